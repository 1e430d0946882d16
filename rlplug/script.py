"""Objects by their path, ``module:name``, and objects of the user's script, which no other process can import.

A configuration names an object of the script like any other, ``rlplug.script:MyEnv``. The run sends the objects to its
actors, ranks and worker processes with cloudpickle. They are never written to a file, so a run that uses them is
resumed from Python, with the objects.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import cloudpickle

from rlplug.types import ConfigError

T = TypeVar("T")
HERE = f"{__name__}:"
WRITTEN = "should be module:name, or {entry_point: module:name, kwargs: {...}}"
_objects: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    """Return the object of the script with this name, for everything that imports ``rlplug.script:<name>``."""
    if name in _objects:
        return _objects[name]
    raise AttributeError(f"the script that started the run defines {name}")


def path_of(thing: Any) -> str:
    """Return the path of an object; keep an object that other processes cannot import, to send it to them."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module != "__main__" and isinstance(name, str) and name.isidentifier():
        try:
            if getattr(importlib.import_module(str(module)), name, None) is thing:
                return f"{module}:{name}"
        except ImportError:  # the module was read from a file
            pass
    last = (name or type(thing).__name__).rpartition("<locals>.")[2]
    base = re.sub(r"\W+", "_", last).strip("_") or "object"
    names = (base, *(f"{base}_{n}" for n in range(2, len(_objects) + 3)))
    return keep(next(one for one in names if one not in globals() and _objects.get(one, thing) is thing), thing)


def keep(name: str, thing: Any) -> str:
    """Keep an object under a name, which may be its whole path, and return the path."""
    _objects[name.removeprefix(HERE)] = thing
    return HERE + name.removeprefix(HERE)


def dumps(raw: Mapping[str, Any] | None = None) -> bytes:
    """Return the objects in a configuration, or all that can be sent, for ``loads`` in another process.

    Raises:
        ConfigError: an object in the configuration cannot be sent.
    """
    found = dict[str, bytes]()
    for name in _objects if raw is None else set(used(raw)) & _objects.keys():
        try:
            found[name] = cloudpickle.dumps(_objects[name])
        except Exception as error:
            if raw is not None:
                said = f"cannot be sent to the run's other processes: {type(error).__name__}: {error}"
                raise ConfigError("", f"{name} {said}; create what it holds inside of it, or use one process") from None
    return pickle.dumps(found)


def loads(data: bytes) -> None:
    """Keep the objects of ``dumps``."""
    _objects.update({name: pickle.loads(thing) for name, thing in pickle.loads(data).items()})


@dataclass(frozen=True)
class Sent:
    """A function that is called in another process, after the objects of the script have arrived there."""

    function: Callable[..., Any]
    objects: bytes

    def __call__(self, *args: Any) -> Any:
        loads(self.objects)
        return self.function(*args)


def attribute(path: str, key: str) -> Any:
    """Return the object at a path.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(key, f"is {path!r}; write module:name")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # from the module itself, or for an invalid name
        raise ConfigError(key, f"{path}: the module {module!r} cannot be imported ({error})") from error
    try:
        return reduce(getattr, name.split("."), found)
    except AttributeError:
        if path.startswith(HERE):
            said = f"{name} is defined in the script that started the run, and is not known here"
            way = "pass it from Python, as in rlplug.load(run, model=Net) and rlplug.resume(run, env=MyEnv)"
            raise ConfigError(key, f"{said}; {way}") from None
        raise ConfigError(key, f"the module {module!r} has no {name!r}") from None


def function_at(path: str, key: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Return the function at a path. Raises ``ConfigError`` if there is none that takes these positional arguments."""
    if not callable(found := attribute(path, key)):
        raise ConfigError(key, f"{path} is {type(found).__name__}, which cannot be called")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError:
        takes = f"takes {inspect.signature(found)}, and is called with ({', '.join(arguments)})"
        raise ConfigError(key, f"{path} {takes}") from None
    except ValueError:  # a function in C has no signature
        pass
    return found


def parts(node: Any, key: str) -> tuple[str, Mapping[str, Any]]:
    """Return path and arguments of ``module:name``, or of ``{entry_point: module:name, kwargs: {...}}``.

    Raises:
        ConfigError: the node is neither.
    """
    given = {"entry_point": node} if isinstance(node, str) else node
    if isinstance(given, Mapping) and given.keys() <= {"entry_point", "kwargs"}:
        path, kwargs = given.get("entry_point"), given.get("kwargs") or {}
        if isinstance(path, str) and isinstance(kwargs, Mapping):
            return path, kwargs
    raise ConfigError(key, f"{node!r} {WRITTEN}")


def make(node: Any, key: str, *args: Any) -> Any:
    """Call the callable of a node, as for ``parts``, with ``args`` and its keyword arguments, and return the result.

    An object that is not callable is returned unchanged, if there are no arguments.

    Raises:
        ConfigError: there is no such object, or it raises.
    """
    path, kwargs = parts(node, key)
    function = attribute(path, key)
    if not callable(function):
        if args or kwargs:
            raise ConfigError(key, f"{path} is {type(function).__name__}, which cannot be called")
        return function
    try:
        return function(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ConfigError(key, f"{path} cannot be made: {said}") from error


def used(node: Any) -> Iterator[str]:
    """Yield the names of the script's objects in a configuration."""
    values = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    if isinstance(node, str) and node.startswith(HERE):
        yield node.removeprefix(HERE)
    for value in values:
        yield from used(value)


def name_of(env: Mapping[str, Any]) -> str:
    """Return the name of an environment, from its node in a configuration."""
    own = str(env.get("entry_point") or "").rpartition(":")[2]
    return str(env.get("id") or own or env.get("name"))


def described(raw: Mapping[str, Any]) -> dict[str, str]:
    """Describe the script's objects in a configuration, by name: ``class MyEnv of train.py, line 12``."""
    return {name: _described(_objects[name]) for name in used(raw) if name in _objects}


def _described(thing: Any) -> str:
    whole = isinstance(thing, type) or inspect.isfunction(thing)
    kind = "class" if isinstance(thing, type) else "function" if whole else "object of class"
    source: Any = thing if whole else type(thing)
    said = f"{kind} {source.__qualname__} of {source.__module__}"
    try:
        return f"{said}, {inspect.getsourcefile(source)}:{inspect.findsource(source)[1] + 1}"
    except (OSError, TypeError):
        return said

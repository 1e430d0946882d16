"""Checks of classes before a run: members and signatures, ``Needs``, ``Plan`` and spaces."""

from __future__ import annotations

import inspect
import re
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Protocol, get_type_hints

from gymnasium.vector import AutoresetMode
from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError
from torch import nn

from rlplug import api, tree
from rlplug.api import Algorithm, Buffer, Context, Exploration, Loop, Model, Needs, Tempo, Trainable, VecEnv, Window
from rlplug.contract import explained, mistake, refuse
from rlplug.envs.rows import spec_misfit
from rlplug.plan import Hardware, Plan
from rlplug.registry import KINDS, Events, Kind
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError, EnvSpec

_DECLARE = (Algorithm, Model, Buffer, Exploration, VecEnv, Loop, Hardware, Events, api.Curriculum, api.Estimator)
BASES: Mapping[Kind, type[Any]] = dict(zip(KINDS, _DECLARE, strict=True))
"""base of each kind, whose members' signatures a class must be compatible with"""
DERIVED: tuple[Kind, ...] = ("algo", "model", "buffer", "exploration", "env", "loop", "curriculum", "estimator")
MEMBERS: Mapping[Kind, tuple[str, ...]] = {  # required members; the base has the others
    "algo": ("needs", "act"),
    "model": ("forward",),
    "loop": ("run",),
    "buffer": ("gives", "sequences", "size_key", "add", "ready", "sample", "feedback", "nbytes", "save", "load"),
    "hardware": ("plan",),
    "curriculum": ("tasks",),
    "estimator": ("estimate",),
    "env": ("spec", "autoreset", "reset", "step", "state", "load", "close"),
}


class Made(Protocol):
    """Constructor of components of every kind."""

    def __init__(self, cfg: Any, ctx: Context) -> None: ...


def check_class(kind: Kind, cls: type[Any]) -> None:
    """Raise ``ConfigError`` unless a class has the members of its kind. Calls none of them."""
    base = BASES[kind]
    if kind in DERIVED and base not in getattr(cls, "__mro__", ()):
        raise mistake(cls, "", f"is not a subclass of {base.__name__}; write class {cls.__name__}({base.__name__})")
    if not hasattr(getattr(cls, "Config", None), "__pydantic_fields__"):
        what = "an ordinary class" if hasattr(cls, "Config") else "missing; write it as a class"
        raise mistake(cls, "Config", f"is {what}; add @settings of rlplug.settings")
    own = next(parent for parent in cls.__mro__ if {"__init__", "__new__"} & vars(parent).keys())
    if own in base.__mro__:
        raise _missing(cls, Made, "__init__")
    refuse(cls, "__init__", _misfit(vars(own).get("__init__") or vars(own)["__new__"].__func__, vars(Made)["__init__"]))
    if kind == "logger":
        check_hooks(cls)
    if kind not in ("env", "logger"):  # environments: see check_env, because another class may create them
        _check_members(kind, cls, ["updates"] * (kind == "loop" and cls.unit == "env_steps"))
    if kind == "algo" and cls.forward is Trainable.forward and cls.update is Trainable.update:
        raise _missing(cls, Trainable, "forward")


def _check_members(kind: Kind, who: Any, more: Sequence[str] = ()) -> None:
    """Check that a class or an object has its members, with compatible signatures."""
    base = BASES[kind]
    for member in (*MEMBERS.get(kind, ()), *more):
        there = inspect.getattr_static(base, member, None)
        if getattr(who, member, None) is None or (there and inspect.getattr_static(who, member, None) is there):
            raise _missing(who, base, member)
    for member, there in declared(kind).items():
        own = inspect.getattr_static(who, member, None)
        on_object = isinstance(own, types.FunctionType) and not isinstance(who, type) and member in vars(who)
        refuse(who, member, _misfit(staticmethod(own) if on_object else own, there))  # without self


@cache
def declared(kind: Kind) -> dict[str, Any]:
    """Return the functions, class methods and properties of the base of a kind, by name."""
    own = [vars(cls) for cls in reversed(BASES[kind].__mro__) if cls.__module__.startswith("rlplug.")]
    called = (types.FunctionType, classmethod, property)
    return {name: x for of in own for name, x in of.items() if isinstance(x, called) and name[0] != "_"}


def _misfit(own: Any, base: Any) -> str | None:
    """Describe an incompatibility of a member with its declaration; None: compatible or unknown."""
    function = getattr(own, "__func__", own)
    if own is base or not isinstance(function, types.FunctionType):
        return None
    if isinstance(base, property) or (isinstance(base, classmethod) and function is own):
        return f"is not a {type(base).__name__}; add @{type(base).__name__}"
    takes, given = _parameters(own), _parameters(base)
    names = [p.name for p in takes]
    try:
        for some in (given, [p for p in given if p.default is p.empty]):
            inspect.Signature(takes).bind(*some)
        fits = all(p.name not in names or names[i] == p.name for i, p in enumerate(given))  # and not swapped
    except TypeError:
        fits = False
    return None if fits else f"takes {_plain(function)}; write {written(base)}"


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters after ``self`` or ``cls``."""
    every = [*inspect.signature(getattr(function, "__func__", function)).parameters.values()]
    bound = every and every[0].kind is not inspect.Parameter.VAR_POSITIONAL and not isinstance(function, staticmethod)
    return every[1:] if bound else every


def _plain(function: Any) -> inspect.Signature:
    """Return a signature without annotations."""
    return inspect.Signature([p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()])


def written(declared: Any) -> str:
    """Format the declaration of a member."""
    function = getattr(declared, "__func__", None) or getattr(declared, "fget", declared)
    mark = "" if function is declared else f"@{type(declared).__name__} "
    return f"{mark}def {function.__name__}{inspect.signature(function)}".replace("'", "")


def _missing(who: Any, base: type[Any], member: str) -> ConfigError:
    """Return the error for a missing member, with its declaration in ``rlplug.api``."""
    there = inspect.getattr_static(base, member, None)
    if there is None or isinstance(there, str | frozenset):
        return mistake(who, member, f"is missing; declare {member}: {base.__annotations__[member]}")
    return mistake(who, member, f"is missing; write {written(there)}")


def check_hooks(cls: type[Any]) -> None:
    """Check that methods named like hooks exist as hooks, are marked, and accept their arguments."""
    hooks = declared("logger")
    for name in dir(cls):
        own = inspect.getattr_static(cls, name)
        mark = getattr(own, "rlplug_impl", None)
        hook = hooks.get((mark and mark["specname"]) or name)
        if not callable(own) or (mark is None and not name.startswith("rlplug_")):
            continue
        if hook is None and not (mark and mark["optionalhook"]):
            raise mistake(cls, name, f"is not a hook; {unknown(name, hooks)}")
        if mark is None:
            raise mistake(cls, name, "is never called; add @hookimpl of rlplug")
        taken = {p.name for p in _parameters(own) if p.default is p.empty}
        if hook and taken - {p.name for p in _parameters(hook)}:
            raise mistake(cls, name, f"takes {_plain(own)}; write {written(hook)}")


def make(cls: type[Any], cfg: Any, ctx: Any) -> Any:
    """Return ``cls(cfg, ctx)``. Raises ``ConfigError`` for mistakes common to all kinds."""
    made: Any = None
    try:
        with explained(cls, "__init__"):
            made = cls(cfg, ctx)
    except AttributeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        made = frame.f_locals.get("self")
        raise
    finally:
        if isinstance(made, nn.Module) and "_modules" not in vars(made):
            raise mistake(made, "__init__", "must call super().__init__() first")
    if Loop in cls.__mro__:
        refuse(made, "tempo", record_misfit(made.tempo, Tempo))
    return made


def ask(kind: Kind, who: Any, member: str, *args: Any) -> Any:
    """Call a member that returns ``Needs``, a ``Plan`` or keys, and check the result.

    Raises:
        ConfigError: the result has another type, or a record with invalid values.
    """
    with explained(who, member):
        returned = getattr(who, member)(*args)
    if kind in ("algo", "hardware"):
        refuse(who, member, record_misfit(returned, Needs if kind == "algo" else Plan))
        refuse(who, member, record_misfit(returned.window, Window) if kind == "algo" else None)
    elif not (isinstance(returned, tuple) and all(isinstance(key, str) for key in returned)):
        raise mistake(who, member, f"returned {tree.what(returned)}; return a tuple of keys of a row")
    return returned


def record_misfit(returned: Any, cls: type[Any]) -> str | None:
    """Describe an invalid value of a dataclass of the contracts; None: all are valid."""
    if not isinstance(returned, cls):
        return f"returned {tree.what(returned)}; return {tree.article(cls.__name__)}"
    for name, hint in get_type_hints(cls).items():
        try:
            _typed(hint).validate_python(x := getattr(returned, name))
        except ValidationError as error:
            got = repr(x) if isinstance(x, str | int | float) else tree.what(x)
            right = re.sub("^Input should be (an instance of )?", "", error.errors()[0]["msg"])
            return f"returned {cls.__name__} with {got} for {name}; expected {right}"
    return None


@cache
def _typed(hint: Any) -> TypeAdapter[Any]:
    if is_dataclass(hint):
        instance_of: Any = InstanceOf
        return TypeAdapter(instance_of[hint])
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def check_env(env: VecEnv) -> EnvSpec:
    """Return the spec of an environment. Raises ``ConfigError`` if members or spaces are invalid."""
    _check_members("env", env)
    refuse(env, "spec", spec_misfit(env.spec))
    if not isinstance(env.autoreset, AutoresetMode):
        raise mistake(env, "autoreset", f"is {tree.what(env.autoreset)}; it must be an AutoresetMode")
    return env.spec

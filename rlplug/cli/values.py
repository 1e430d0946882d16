"""Arguments of Python functions as overrides of a command line, and objects of scripts that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import cloudpickle

from rlplug import script
from rlplug.config import RunConfig
from rlplug.config.origins import CUSTOM
from rlplug.types import ConfigError

Config: TypeAlias = Sequence[str] | RunConfig
Folder: TypeAlias = str | PathLike[str]
WORD = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_][\w.:/@-]*", re.IGNORECASE)
"""values that need no quotes on a command line"""
WHOLE = ("stop", "init_from")
"""settings whose value is a mapping"""


class Copies:
    """Makes copies of an environment. Raises ``ConfigError`` if it cannot be copied."""

    def __init__(self, env: Any) -> None:
        self.spec = None
        try:
            self.data = cloudpickle.dumps(env)
        except Exception as error:
            self.data, self.spec = b"", getattr(env, "spec", None)
            if self.spec is None:
                said = f"{type(env).__name__} cannot be copied for every column ({type(error).__name__}: {error})"
                raise ConfigError("env", f"{said}; pass what makes it: env=lambda: ...") from None

    def __call__(self) -> Any:
        """Return a copy of the environment."""
        import gymnasium

        return cloudpickle.loads(self.data) if self.spec is None else gymnasium.make(self.spec)


def train_words(
    config: Config, env: Any, model: Any, callbacks: Any, folder: Folder | None, settings: Mapping[str, Any]
) -> Config:
    """Return the overrides of the arguments of ``rlplug.train``.

    Raises:
        ConfigError: settings are given with a composed configuration, or an argument is of a wrong type.
    """
    given = {"env": env, "model": model, "callbacks": listed(callbacks) or None}
    given = {key: value for key, value in given.items() if value is not None} | dict(settings)
    if isinstance(config, RunConfig):
        if given:
            raise ConfigError(next(iter(given)), "is given with a composed configuration; pass it to compose()")
        return config
    if isinstance(config, str | Mapping):
        said = "a mapping" if isinstance(config, Mapping) else "one string"
        raise ConfigError("", f"the configuration is {said}; write train(algo='ppo') or train(['algo=ppo'])")
    words = [*config]
    for key, own in (("env", CUSTOM["env"]), ("model", CUSTOM["mod"])):
        if isinstance(node := given.get(key), Mapping) and "entry_point" in node and "name" not in node:
            given[key] = {"name": own, **node}
        elif key in given and not isinstance(given[key], str | Mapping):
            given[key] = script.path_of(_maker(key, given[key]))
    words += overrides_of(given)
    return words + ([] if folder is None else [f"hydra.run.dir={_written(str(folder))}"])


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks as a list, even if there is only one."""
    return [*callbacks] if isinstance(callbacks, Sequence) and not isinstance(callbacks, str) else [callbacks]


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in _overrides(key, value)]


def _maker(key: str, thing: Any) -> Any:
    """Return what makes environments or networks: a class or a function, or copies of an environment."""
    if isinstance(thing, type) or (callable(thing) and not hasattr(thing, "step" if key == "env" else "forward")):
        return thing
    if key == "model":
        raise ConfigError("model", f"is an object of class {type(thing).__name__}; pass the class, model=MyNet")
    if not hasattr(thing, "step"):
        raise ConfigError("env", f"is {thing!r}; pass a name, a class, a function or an environment")
    if hasattr(thing, "single_action_space"):
        raise ConfigError("env", "is a vector of environments; pass one environment, and num_envs=<number>")
    copies = Copies(thing)
    copies.__qualname__ = type(thing).__name__  # type: ignore[attr-defined]
    return copies


def _overrides(key: str, value: Any) -> Iterator[str]:
    if key == "init_from" and isinstance(value, Mapping):
        weights = value if value.keys().isdisjoint(("path", "prefix", "policies")) else value.get("path")
        if isinstance(weights, Mapping):
            kept = script.keep("weights", dict(weights))
            value = kept if weights is value else {**value, "path": kept}
    if isinstance(value, Mapping) and key not in WHOLE:
        chooses = "name" in value and "." not in key
        if chooses:
            yield f"{key}={_written(value['name'])}"
        for name, part in value.items():
            if not chooses or name != "name":
                yield from _overrides(f"{key}.{name}", part)
        return
    yield f"{'++' if key.count('.') > 1 else ''}{key}={_written(value)}"


def _written(value: Any) -> str:
    """Format a value as on a command line; other objects become their paths."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy's and torch's numbers
        return _written(value.item())
    if isinstance(value, int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, str | PathLike):
        text = str(value)
        return (
            text if WORD.fullmatch(text) else "'{}'".format(re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", r"\'"))
        )
    if isinstance(value, Mapping):
        return "{{{}}}".format(", ".join(f"{name}: {_written(part)}" for name, part in value.items()))
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_written, value))}]"
    return _written(script.path_of(value))


def give(config: Callable[[], Mapping[str, Any]], **given: Any) -> None:
    """Register objects of the script under the names that a run's configuration uses.

    Args:
        config: returns the run's configuration; called if any object is given.
        given: objects for ``env``, ``model``, ``callbacks`` and ``eval_function``; None or empty: none is given.

    Raises:
        ConfigError: the run has no such object, or not as many.
    """
    objects = {key: listed(things) for key, things in given.items() if things is not None and listed(things)}
    raw = config() if objects else {}
    for key, things in objects.items():
        names = [*script.used(raw["eval"]["function"] if key == "eval_function" else raw.get(key))]
        if len(names) != len(things):
            has = f"has {', '.join(names)} of a script" if names else "has no object of a script"
            raise ConfigError(key, f"the run {has}, and {len(things)} given")
        for name, thing in zip(names, things, strict=True):
            script.keep(name, _maker("env", thing) if key == "env" else thing)

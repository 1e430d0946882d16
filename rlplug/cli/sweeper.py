"""What the sweepers of rlplug (``sweeper=<name>``) share: their settings, search spaces, and folders."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from rlplug.checkpointing import atomic
from rlplug.cli import space, sweep
from rlplug.config import RunConfig, compose, composed
from rlplug.config.errors import differences, show
from rlplug.config.explain import explained
from rlplug.config.schema import typed
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

MODULES = {"optuna": "study", "pbt": "pbt"}
"""modules of this package, by name of the sweeper; each has ``prepared`` and ``main``"""
T = TypeVar("T")


@dataclass(frozen=True)
class Searched:
    """A checked command line.

    Attributes:
        folder: of the sweep.
        fixed: overrides of all runs.
        space: search space of every swept key.
        run: the configuration of one run.
    """

    folder: Path
    fixed: list[str]
    space: dict[str, space.Space]
    run: RunConfig


def module(overrides: Sequence[str]) -> ModuleType | None:
    """Return the module of the sweeper that a command line names; None: it names none.

    Raises:
        ConfigError: there is no such sweeper.
    """
    chosen = [word.partition("=")[2] for word in overrides if word.startswith("sweeper=")]
    if not chosen:
        return None
    if chosen[-1] not in MODULES:
        raise ConfigError("sweeper", f"there is no sweeper {chosen[-1]!r}; {unknown(chosen[-1], MODULES)}")
    return importlib.import_module(f"rlplug.cli.{MODULES[chosen[-1]]}")


def settings(config: type[T], overrides: Sequence[str]) -> tuple[T, list[str]]:
    """Return the settings of the sweeper, as changed by ``sweeper.<option>=<value>``, and the other overrides."""
    own = [word for word in overrides if word.startswith(("sweeper=", "sweeper."))]
    chosen = [word for word in own if word.startswith("sweeper=")][-1]
    changes = parsed([word for word in own if not word.startswith("sweeper=")])
    node: dict[str, Any] = OmegaConf.to_container(composed([f"+{chosen}"]).sweeper)  # type: ignore[assignment]
    for one in changes:
        if one.is_sweep_override():
            raise ConfigError(one.key_or_group, "has one value for the whole sweep")
        inner, (*path, last) = node, one.key_or_group.removeprefix("sweeper.").split(".")
        for key in path:
            inner[key] = inner = inner[key] if isinstance(inner.get(key), dict) else {}
        inner[last] = one.value()
    return typed(config, node, "sweeper"), [word for word in overrides if word not in own]


def parsed(words: Sequence[str]) -> list[Override]:
    """Return overrides in Hydra's syntax, or raise ``ConfigError`` with the mistake."""
    with explained(words):
        return OverridesParser.create().parse_overrides(list(words))


def split(words: Sequence[str], name: str) -> tuple[list[Override], list[Override]]:
    """Return the overrides of all runs, and those that sweep.

    Raises:
        ConfigError: nothing is swept.
    """
    overrides = parsed(words)
    swept = [one for one in overrides if one.is_sweep_override()]
    if not any(one.key_or_group != "seed" for one in swept):
        example = "'algo.lr=interval(1e-5,1e-2)' algo.gamma=0.95,0.99"
        raise ConfigError("sweeper", f"{name} needs settings to search, as in {example}")
    return [one for one in overrides if one not in swept], swept


def search(
    name: str, words: Sequence[str], given: Sequence[Override], swept: Sequence[Override], here: bool
) -> Searched:
    """Check every value and both ends of every interval, with the first values of other keys; write nothing.

    Args:
        here: this machine trains the runs, so build the first one, too; a cluster may have other devices.

    Raises:
        ConfigError: a setting is wrong, or runs cannot be compared by evaluations.
    """
    folder, _ = sweep.check_sweep(words)
    values = {one.get_key_element(): [*one.sweep_string_iterator()] for one in swept if one.is_discrete_sweep()}
    fixed = [str(one.input_line) for one in given if not one.key_or_group.startswith("hydra.")]
    searched = space.spaces(swept, values)
    for one in given:
        if one.key_or_group in searched:
            raise ConfigError(one.key_or_group, "has a single value and a search space; leave one out")

    def tried(settings: Mapping[str, str]) -> RunConfig:
        return compose([*fixed, *space.words({**{key: one.ends[0] for key, one in searched.items()}, **settings})])

    for key, one in searched.items():
        if isinstance(one, space.Interval) and one.whole:
            with suppress(ConfigError):
                tried({key: repr(one.low + 0.5)})
                searched[key] = replace(one, whole=False)
    run = tried({})
    for key, one in searched.items():
        for end in one.ends:
            tried({key: end})
    if not run.env.cls.traits.playable:
        raise ConfigError("sweeper", f"{name} compares evaluations, but env={run.env.name} cannot be played")

    if here:
        from rlplug.run.build import build  # here, because torch takes seconds to import

        build(run, Path()).close()
    return Searched(folder, fixed, searched, run)


def state(file: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of the JSON file that describes a sweep; None: there is none.

    Raises:
        ConfigError: it describes another sweep than ``about``, or is damaged.
    """
    with suppress(FileNotFoundError):
        try:
            found = json.loads(atomic.read(file))
            before = {key: found[key] for key in about}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("hydra.sweep.dir", f"{file} is damaged ({error}); choose another folder") from None
        for key, old, new in differences(before, json.loads(json.dumps(about))):
            said = f"{file.parent} has {key}={show(old)}, which now is {show(new)}; choose another folder"
            raise ConfigError("hydra.sweep.dir", said)
        return found
    return None

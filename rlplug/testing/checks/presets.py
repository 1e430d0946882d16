"""Checks of a package's YAML files: each composes, and passes ``rlplug check``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import yaml

from rlplug import registry
from rlplug.config import choose, compose, option_names
from rlplug.registry import KINDS, Preset
from rlplug.run.build import build
from rlplug.testing.checks import envs, models
from rlplug.testing.checks.runs import node_of, require
from rlplug.testing.checks.words import accepted
from rlplug.types import ConfigError

HERE = ("hardware=cpu", "logger.only=[]", "compile=off")


def of(distribution: str | None) -> Iterator[Preset]:
    """Yield the files that the checks of the distribution's components do not read: tuned settings, experiments, and
    options that select another distribution's component; None: those of every distribution."""
    for (group, option), (file, *_) in registry.presets().items():
        if distribution not in (None, file.plugin.distribution):
            continue
        settings = group in ("tuned", "experiment") and not _empty(file)
        if settings or (group in KINDS and not _own(file, option)):
            yield file


def _empty(file: Preset) -> bool:
    """Return whether it sets nothing, like ``tuned=none``."""
    return not yaml.safe_load(file.path.read_text(encoding="utf-8"))


def _own(file: Preset, option: str) -> bool:
    """Return whether a component of the same distribution, whose checks read the file, has this name."""
    group: registry.Kind = file.group  # type: ignore[assignment]
    owners = registry.owners().get((group, str(node_of(group, option).get("name"))), ())
    return file.plugin in owners and (group != "algo" or node_of(group, option)["name"] == option)


def check_preset(file: Preset) -> None:
    """Compose and build a run with the preset.

    Warns if it is for a package that is not installed, and is not checked.
    """
    try:
        _check(file)
    except ConfigError as error:
        if "pip install" not in error.message:
            raise
        warnings.warn(f"{file} is not checked: {error}", stacklevel=2)


def _check(file: Preset) -> None:
    group, option = file.group, file.option
    match group:
        case "tuned":
            _build(_pair(option))
        case "experiment":
            _build([f"experiment={option}"])
        case "algo":
            name = str(node_of("algo", option)["name"])
            _build([*registry.tried_with("algo", name), f"algo={option}", f"env={accepted(name, option)[0]}"])
        case "env":
            if envs.is_complete(node_of("env", option)):
                envs.check_env(str(node_of("env", option)["name"]), option)
        case "model":
            models.check_model(str(node_of("model", option)["name"]), option)
        case _:
            choose(group, group, node_of(group, option))  # type: ignore[arg-type]


def _pair(option: str) -> list[str]:
    """Return the overrides of the tuned settings ``<algo>_<env>``, and of the algorithm's manifest."""
    pairs = [(algo, option[len(algo) + 1 :]) for algo in option_names("algo") if option.startswith(f"{algo}_")]
    pairs = [(algo, env) for algo, env in pairs if env in option_names("env")]
    require(pairs, f"conf/tuned/{option}.yaml matches no pair: name it <algo>_<env>, after existing options")
    algo, env = pairs[-1]
    words = registry.tried_with("algo", str(node_of("algo", algo)["name"]))
    return [*(word for word in words if not word.startswith("env=")), f"algo={algo}", f"env={env}"]


def _build(words: Sequence[str]) -> None:
    try:
        with closing(build(compose([*words, *HERE]), Path())):
            pass
    except Exception as error:
        error.add_note(f"tried with {' '.join(words)}")
        raise

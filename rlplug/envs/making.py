"""Environments by their Gymnasium id, and what to say when there is none."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlplug.envs.env_list import EnvList
from rlplug.envs.native import NativeVector
from rlplug.types import ConfigError

E = TypeVar("E")

PACKAGES = {
    "ALE": ("ale_py", "rlplug[atari]"),
    "BabyAI": ("minigrid", "minigrid"),
    "MiniGrid": ("minigrid", "minigrid"),
    "dm_control": ("shimmy", "shimmy[dm-control]"),
}
"""First word of an id -> the module that registers it, and what pip calls that."""


def find(env_id: str) -> EnvSpec:
    """What is registered under ``Name-v0``, ``namespace/Name-v0`` or ``module:Name-v0`` (imports the module).

    Raises:
        ConfigError: nothing is; says what is there, or what to install.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, f"{env_id}: the module {module!r} cannot be imported")
    word = re.split("[/-]", name)[0]
    if name not in gymnasium.registry and word in PACKAGES:
        known, package = PACKAGES[word]
        _import(known, f"{env_id} comes with a package that cannot be imported: pip install {package!r}")
    if name in gymnasium.registry:
        return gymnasium.registry[name]

    base = _base(name)
    versions = [registered for registered in gymnasium.registry if _base(registered) == base]
    if versions:
        raise ConfigError("env.id", f"there is no {name!r}; its versions are {', '.join(versions)}")
    lower = {registered.lower(): registered for registered in gymnasium.registry}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing registered has a similar name."
    raise ConfigError(
        "env.id",
        f"there is no environment {name!r}; {hint} An environment of another package is registered when that"
        f" is imported, as in env.id=package:{name}",
    )


def make_list(
    spec: EnvSpec, num_envs: int, kwargs: Mapping[str, Any] | None = None, max_episode_steps: int | None = None
) -> EnvList:
    """``num_envs`` environments in a Python loop.

    Args:
        spec: what ``find`` returned.
        kwargs: for the environment's constructor.
        max_episode_steps: None: as registered.

    Raises:
        ConfigError: the environment cannot be made; says why, and what to install.
    """
    # EnvList resets before it steps: no order to enforce, and nothing to check at every step.
    bare = replace(spec, order_enforce=False, disable_env_checker=True)

    def make() -> Any:
        return gymnasium.make(bare, max_episode_steps=max_episode_steps, **(kwargs or {}))

    envs = [_explain(spec.id, spec.entry_point, make) for _ in range(num_envs)]
    return EnvList(envs, max_episode_steps or spec.max_episode_steps)


def has_native(spec: EnvSpec) -> bool:
    """Does the environment register a vector of its own, free of wrappers for single environments?"""
    return spec.vector_entry_point is not None and not spec.additional_wrappers


def make_native(
    spec: EnvSpec, num_envs: int, kwargs: Mapping[str, Any] | None = None, max_episode_steps: int | None = None
) -> NativeVector:
    """``num_envs`` environments that are one vector by themselves. Arguments and errors as ``make_list``."""
    if not has_native(spec):
        raise ConfigError("env.vectorization", f"{spec.id} registers no vector of its own; use auto or list")
    options = dict(kwargs or {})
    if max_episode_steps is not None:
        options["max_episode_steps"] = max_episode_steps

    def make() -> Any:
        return gymnasium.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **options)

    env = _explain(spec.id, spec.vector_entry_point, make)
    return NativeVector(env, max_episode_steps or spec.max_episode_steps)


def _base(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _import(module: str, message: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError("env.id", f"{message} ({error})") from error


def _explain(env_id: str, entry_point: Any, make: Callable[[], E]) -> E:
    """``make()``, its exceptions turned into ones that tell the user what to do."""
    try:
        return make()
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError("env.id", f"{env_id} needs what is not installed: {error}") from error
    except Exception as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
            known = ", ".join(name for name in inspect.signature(creator).parameters if name != "num_envs")
            key = "env.max_episode_steps" if unknown[1] == "max_episode_steps" else "env.kwargs"
            raise ConfigError(key, f"{env_id} takes no {unknown[1]!r}; it takes {known or 'none'}") from error
        raise ConfigError("env.id", f"{env_id} cannot be made: {type(error).__name__}: {error}") from error

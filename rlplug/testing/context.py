"""Contexts in one line, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlplug.registry.discovery import until_refresh
from rlplug.types import EnvSpec, Group

if TYPE_CHECKING:
    from rlplug.context import RunContext


def spec(obs: Any = 4, action: Any = 2) -> EnvSpec:
    """Return a single agent's spec. A number is a vector observation's size, or the number of discrete actions."""
    if isinstance(obs, int):
        obs = spaces.Box(-np.inf, np.inf, (obs,), np.float32)
    if isinstance(action, int):
        action = spaces.Discrete(action)
    return EnvSpec({"default": Group(obs, action)})


def box(size: int) -> spaces.Box:
    """Return the space of ``size`` continuous actions in [-1, 1]."""
    return spaces.Box(-1.0, 1.0, (size,), np.float32)


def context(of: EnvSpec | None = None, *, overrides: Any = (), **options: Any) -> RunContext:
    """Return a ``Context`` on the CPU, with the models of ``overrides`` (as on the command line).

    Args:
        of: the spaces; None: those of the environment of ``overrides``, whose simulator and goals the context then
            offers, or without ``env=`` a vector of size 4 and 2 discrete actions.
        options: see ``RunContext``: ``needs``, ``num_envs``, ``rollout_length``, ``batch_size``, ``seed`` ...
    """
    from rlplug.context import RunContext  # here: environment processes import this file without torch

    config = _composed(*overrides)
    if of is None and any(word.startswith("env=") for word in overrides):
        env = config.env.build(RunContext(spec=EnvSpec({})))
        env.close()
        of, options = env.spec, {"make_env": config.env.build} | options
    return RunContext(spec=of or spec(), slots=dict(config.models), **options)


@until_refresh
def _composed(*overrides: str) -> Any:
    from rlplug.config import compose

    return compose(overrides)

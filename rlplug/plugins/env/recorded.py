"""The spaces of a dataset, for training without its environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode

from rlplug.api import Context, EnvTraits, VecEnv
from rlplug.data.recording import files_of, open_file
from rlplug.data.source import Reading
from rlplug.envs.spaces import single_agent
from rlplug.settings import option, settings
from rlplug.types import ConfigError, EnvSpec, RunError

WAY = "python -m rlplug estimate <run> estimates its policy's return from recorded episodes"
UNPLAYABLE = f"env=recorded has only recorded episodes and cannot be played; {WAY}"


FORMS = "{shape: [4], low: -1, high: 1}, where low and high may be left out, {n: 2} or {nvec: [2, 3]}"


class Recorded(VecEnv):
    """An environment with the spaces of a dataset, read from its files or written in the configuration.

    It cannot be stepped, so there are no evaluation episodes.

    Raises:
        ConfigError: there is no file, it was written by another library and has no spaces, or a space is malformed.
    """

    traits = EnvTraits(playable=False)
    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        path: str | None = option("Files, a folder or a pattern, written by rlplug; null: the spaces below.")
        observation_space: dict[str, Any] | None = option("{shape: [4], low: -1, high: 1}, {n: 2} or {nvec: [2, 3]}.")
        action_space: dict[str, Any] | None = option("The same, for actions.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        written = {"observation_space": cfg.observation_space, "action_space": cfg.action_space}
        if missing := [key for key, node in written.items() if node is None]:
            if cfg.path is None:
                raise ConfigError(f"env.{missing[0]}", f"is missing; write {FORMS}, or name files with env.path")
            if len(missing) == 1:
                raise ConfigError(f"env.{missing[0]}", f"is missing, but the other space is written; write {FORMS}")
        elif cfg.path is not None:
            raise ConfigError("env.path", "has spaces of its own, but others are written; leave it out")
        else:
            obs, action = (space_of(f"env.{key}", node or {}) for key, node in written.items())
            self.spec: EnvSpec = single_agent(obs, action, None)
            return
        reading = Reading(damaged="skip", unfinished="skip", key="env.path")
        source = open_file(files_of(str(cfg.path), reading.key)[0], reading)
        if source.spec is None:
            raise ConfigError(
                "env.path",
                f"{source.path} does not declare its spaces; choose its environment with env=, or write the spaces:"
                " env.observation_space and env.action_space",
            )
        self.spec = source.spec

    def reset(self, seeds: Any, tasks: Any = None) -> Any:
        raise RunError(UNPLAYABLE)

    def step(self, action: Any) -> Any:
        raise RunError(UNPLAYABLE)

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def space_of(key: str, node: dict[str, Any]) -> Space[Any]:
    """Return the space that a mapping describes, as in ``FORMS``; a Box may have a ``dtype``, by default float32."""
    kinds = {"shape": {"shape", "low", "high", "dtype"}, "n": {"n"}, "nvec": {"nvec"}}
    kind = next((kind for kind in kinds if kind in node), None)
    if kind is None or node.keys() - kinds[kind]:
        raise ConfigError(key, f"{node} is no space; write {FORMS}")
    try:
        if kind == "n":
            return Discrete(node["n"])
        if kind == "nvec":
            return MultiDiscrete(node["nvec"])
        low, high = (-np.inf if node.get("low") is None else node["low"], node.get("high"))
        low, high = (np.broadcast_to(x, node["shape"]) for x in (low, np.inf if high is None else high))
        dtype = np.dtype(node.get("dtype", "float32"))
        return Box(low.astype(dtype), high.astype(dtype), tuple(node["shape"]), dtype.type)
    except (AssertionError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(key, f"{node} is no space: {error or 'its numbers do not fit'}; write {FORMS}") from None

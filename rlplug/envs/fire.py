"""Wrappers for Atari games that wait for FIRE before each life, such as Breakout."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from rlplug.types import ConfigError


def fire_of(env: gymnasium.Env[Any, Any]) -> int:
    """Return the index of the FIRE action.

    Raises:
        ConfigError: the environment is not an Atari game, or has no FIRE action.
    """
    meanings = getattr(env.unwrapped, "get_action_meanings", list[str])()
    if "FIRE" not in meanings:
        said = f"; its actions are {', '.join(meanings)}" if meanings else ": it is not an Atari game"
        raise ConfigError("env.fire", f"{env.unwrapped.spec.id} has no action FIRE{said}; use false")  # type: ignore[union-attr]
    return meanings.index("FIRE")


class Fire(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces the first action of every life by FIRE, as a sticky action would replace it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.fire, self.lives, self.waits = fire_of(env), 0, True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.lives, self.waits = info["lives"], True
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(self.fire if self.waits else action)
        self.lives, self.waits = info["lives"], info["lives"] < self.lives
        return obs, reward, terminated, truncated, info


class FireVector(VectorWrapper[Any, Any, Any]):
    """Does the same for a vector with autoreset mode ``NEXT_STEP``, which detects resets by lives and episode ends."""

    def __init__(self, env: VectorEnv[Any, Any, Any], fire: int) -> None:
        super().__init__(env)
        self.fire = fire
        self.lives = self.waits = self.over = np.zeros(env.num_envs, np.bool_)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.lives, self.over = info["lives"].copy(), np.zeros(self.num_envs, np.bool_)
        self.waits = ~self.over
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        out = self.env.step(np.where(self.waits, self.fire, actions))
        lives = out[4]["lives"].copy()
        self.waits = self.over | (lives < self.lives)
        self.lives, self.over = lives, out[2] | out[3]
        return out

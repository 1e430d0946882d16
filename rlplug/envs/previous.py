"""The previous action and reward as inputs of the policy."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, flatten

from rlplug.envs.wrapping import flat_box
from rlplug.types import ConfigError


class PreviousInputs(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the previous action and reward to the observation, as in Wang et al. 2016 (arXiv:1611.05763).

    The observation is a Dict of ``obs``, ``prev_action [A]`` and ``prev_reward [1]``. ``prev_action`` is flat, and
    one-hot if the action is discrete; it and the reward are zero at the start of an episode.

    Raises:
        ConfigError: the action space cannot be flattened to a vector.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        if (flat := flat_box(env.action_space)) is None:
            raise ConfigError("env.wrappers", f"PreviousInputs cannot flatten the action space {env.action_space}")
        zero = np.zeros(flat.shape, np.float32)
        low, high = np.minimum(flat.low, zero), np.maximum(flat.high, zero)
        action, reward = Box(low.astype(np.float32), high.astype(np.float32)), Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = Dict(obs=env.observation_space, prev_action=action, prev_reward=reward)
        self._none = zero

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        return {"obs": obs, "prev_action": self._none.copy(), "prev_reward": np.zeros(1, np.float32)}, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        before = np.asarray(flatten(self.env.action_space, action), np.float32)
        rows = {"obs": obs, "prev_action": before, "prev_reward": np.array([reward], np.float32)}
        return rows, reward, terminated, truncated, info

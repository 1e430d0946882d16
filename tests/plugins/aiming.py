"""An environment whose best action needs both a number and a choice."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

STEPS = 8
BEST = float(STEPS)
ONE_PART = STEPS / 2
"""the best mean return of a policy that ignores where the target is; one that ignores which target it is gets 8 / 3"""


class Aiming(gymnasium.Env[np.ndarray, Any]):
    """Hit the target: 1 minus the distance, if the right one of three is chosen, else 0.

    It observes where the target is, in [-1, 1], and which one it is, one-hot. It raises on invalid actions.

    Args:
        mask: ``info`` has masks that forbid one wrong target.
    """

    def __init__(self, mask: bool = False) -> None:
        self.observation_space = Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = Dict({"which": Discrete(3, start=1), "where": Box(0.0, 10.0, (1,), np.float32)})
        self.mask, self.left = mask, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = STEPS
        return self._row()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action} is not in {self.action_space}")
        if self.mask and not self.allowed[action["which"] - 1]:
            raise ValueError(f"{action} is masked")
        at = action["where"].item() / 5.0 - 1.0
        reward = 1.0 - abs(at - self.where) if action["which"] - 1 == self.which else 0.0
        self.left -= 1
        obs, info = self._row()
        return obs, reward, False, self.left == 0, info

    def _row(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.where, self.which = self.np_random.uniform(-1.0, 1.0), int(self.np_random.integers(3))
        self.allowed = np.arange(3) != (self.which + self.np_random.integers(1, 3)) % 3
        obs = np.array([self.where, *(np.arange(3) == self.which)], np.float32)
        return obs, {"action_mask": self.allowed} if self.mask else {}

"""Pendulums of different mass, which is the task."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.spaces import Box


class PendulumMass(PendulumEnv):
    """Pendulum-v1 whose mass, which it does not observe, is uniform between ``lowest`` and ``highest``."""

    def __init__(self, lowest: float = 0.5, highest: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.task_space = Box(lowest, highest, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        low, high = self.task_space.low, self.task_space.high
        task = (options or {}).get("task")
        task = self.np_random.uniform(low, high).astype(np.float32) if task is None else np.asarray(task, np.float32)
        self.m = float(task[0])
        return obs, {**info, "task": task}


gymnasium.register("rlplug/PendulumMass-v0", f"{__name__}:PendulumMass", max_episode_steps=200)

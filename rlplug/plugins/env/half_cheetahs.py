"""HalfCheetah with tasks: a direction to run in, or a velocity to run at."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.spaces import Box, Discrete


class HalfCheetahDirection(HalfCheetahEnv):
    """Runs forward (task 1) or backward (task 0): Finn et al. 2017 (arXiv:1703.03400), section 5.3."""

    task_space: Any = Discrete(2)
    task: Any = 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        given = (options or {}).get("task")
        self.task = self.drawn() if given is None else given
        return obs, {**info, "task": self.task}

    def drawn(self) -> Any:
        """Draw a task from the environment's generator."""
        return int(self.np_random.integers(2))

    def gain(self, velocity: float) -> float:
        """Return the part of the reward that depends on the velocity in m/s."""
        return velocity if int(self.task) else -velocity

    def _get_rew(self, x_velocity: float, action: Any) -> tuple[float, dict[str, float]]:
        forward, cost = self._forward_reward_weight * self.gain(x_velocity), self.control_cost(action)
        return forward - cost, {"reward_forward": forward, "reward_ctrl": -cost}


class HalfCheetahVelocity(HalfCheetahDirection):
    """Runs at a target velocity of 0 to 2 m/s; every step costs the difference from it."""

    task_space = Box(0.0, 2.0, (1,), np.float32)

    def drawn(self) -> Any:
        return self.np_random.uniform(0.0, 2.0, 1).astype(np.float32)

    def gain(self, velocity: float) -> float:
        return -abs(velocity - float(self.task[0]))


for name in ("Direction", "Velocity"):
    gymnasium.register(f"rlplug/HalfCheetah{name}-v0", f"{__name__}:HalfCheetah{name}", max_episode_steps=200)

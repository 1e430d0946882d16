"""MiniGrid's rooms with a key and a door, whose size is the task."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Discrete
from minigrid.envs.doorkey import DoorKeyEnv

SMALLEST = 5


class DoorKeys(DoorKeyEnv):
    """MiniGrid-DoorKey with rooms of ``task x task`` fields, walls included, and MiniGrid's limit of 10 task^2 steps.

    The agent sees 7x7 fields in front of it, whatever the size. The reward at the goal is 1 - 0.9 steps / limit.

    Args:
        size: the largest task, which is the default.
        kwargs: further arguments of ``MiniGridEnv``.

    Raises:
        ValueError: a size below 5, for which MiniGrid has no room.
    """

    def __init__(self, size: int = 8, **kwargs: Any) -> None:
        if size < SMALLEST:
            raise ValueError(f"size={size} is below {SMALLEST}, the smallest room")
        super().__init__(size=size, **kwargs)
        self.task_space = Discrete(size - SMALLEST + 1, start=SMALLEST)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        task = int((options or {}).get("task", self.task_space.start + self.task_space.n - 1))
        if task not in self.task_space:
            raise ValueError(f"{task} is none of the tasks {self.task_space}")
        self.width = self.height = task
        self.max_steps = 10 * task**2
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "task": task}


gymnasium.register("rlplug/DoorKeys-v0", f"{__name__}:DoorKeys")

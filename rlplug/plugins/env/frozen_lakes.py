"""Frozen lakes whose size is the task."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up, as in FrozenLake-v1
SMALLEST = 2


class FrozenLakes(gymnasium.Env[Any, Any]):
    """A lake of ``size x size`` fields, of which the task ``n`` uses the last ``n`` rows and columns.

    The observation is the field's number in the whole lake; an episode begins in the upper left field of its part, and
    the goal, the only reward, is the lower right field. So the fields that a small task knows are the last ones of a
    larger one. A hole ends the episode. Each part has a way to the goal.

    Args:
        size: rows and columns of the largest task, which is the default.
        holes: probability that a field is a hole.
        map_seed: seed of the map, equal in all environments.
        slip: probability that a move goes to one of both sides instead.

    Raises:
        ValueError: the size is below 2, a probability is not valid, or no map with a way to the goal was found.
    """

    def __init__(self, size: int = 12, holes: float = 0.2, map_seed: int = 0, slip: float = 0.0) -> None:
        if size < SMALLEST or not 0 <= holes < 1 or not 0 <= slip <= 1:
            raise ValueError(f"size={size}, holes={holes}, slip={slip}: size is at least 2, the others probabilities")
        self.size, self.slip, self.render_mode = size, slip, None
        self.observation_space, self.action_space = Discrete(size * size), Discrete(len(MOVES))
        self.task_space = Discrete(size - SMALLEST + 1, start=SMALLEST)
        self.hole = lake(size, holes, map_seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {}).get("task", self.size)
        if task not in self.task_space:
            raise ValueError(f"{task} is none of the tasks {self.task_space}")
        self._first = self._row = self._column = self.size - int(task)
        return self._field, {"task": int(task)}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.slip and self.np_random.random() < self.slip:
            action = (action + self.np_random.choice((-1, 1))) % len(MOVES)
        down, right = MOVES[action]
        self._row, self._column = (
            min(max(x, self._first), self.size - 1) for x in (self._row + down, self._column + right)
        )
        goal = self._row == self._column == self.size - 1
        return self._field, float(goal), goal or bool(self.hole[self._row, self._column]), False, {}

    @property
    def _field(self) -> int:
        return self._row * self.size + self._column


def lake(size: int, holes: float, seed: int) -> np.ndarray:
    """Return where the holes are, ``[size, size]`` bool, with a way from every ``(i, i)`` to the goal in its part."""
    rng, hole = np.random.default_rng(seed), np.zeros((size, size), np.bool_)
    for first in range(size - SMALLEST, -1, -1):
        for _ in range(1000):
            hole[first, first:], hole[first:, first] = rng.random((2, size - first)) < holes
            hole[first, first] = hole[-1, -1] = False
            if has_way(hole[first:, first:]):
                break
        else:
            raise ValueError(f"holes={holes}: no lake with a way to the goal was found; use fewer")
    return hole


def has_way(hole: np.ndarray) -> bool:
    """Return whether the last field can be reached from the first."""
    n, reached, waiting = len(hole), {(0, 0)}, [(0, 0)]
    while waiting:
        row, column = waiting.pop()
        for down, right in MOVES:
            to = row + down, column + right
            if to not in reached and min(to) >= 0 and max(to) < n and not hole[to]:
                reached.add(to)
                waiting.append(to)
    return (n - 1, n - 1) in reached


gymnasium.register("rlplug/FrozenLakes-v0", f"{__name__}:FrozenLakes")

"""A space of actions that Gymnasium lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiDiscrete, Space


class Hybrid(Space[np.ndarray]):
    """A hybrid action space as one vector: ``N`` continuous numbers, then ``C`` discrete actions, ``[N + C]`` float32.

    An action space with continuous and with discrete parts is this one inside, whatever the environment's own looks
    like. float32 holds indices up to 2^24 exactly.

    Args:
        continuous: float32 ``[N]``.
        discrete: ``[C]``, from 0.

    Raises:
        ValueError: one of them is not such a space.
    """

    def __init__(self, continuous: Box, discrete: MultiDiscrete) -> None:
        if not isinstance(continuous, Box) or len(continuous.shape) != 1 or continuous.dtype != np.float32:
            raise ValueError(f"the continuous part is {continuous}; give a float32 Box [N]")
        if not isinstance(discrete, MultiDiscrete) or discrete.nvec.ndim != 1 or np.any(discrete.start):
            raise ValueError(f"the discrete part is {discrete}; give a MultiDiscrete [C] that counts from 0")
        self.continuous, self.discrete, self.size = continuous, discrete, int(continuous.shape[0])
        super().__init__((self.size + len(discrete.nvec),), np.float32)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def is_bounded(self) -> bool:
        """Return whether all continuous numbers are bounded on both sides."""
        return self.continuous.is_bounded()

    def seed(self, seed: int | None = None) -> Any:
        first = super().seed(seed)
        for part in (self.continuous, self.discrete):
            part.seed(int(self.np_random.integers(2**31)))
        return first

    def sample(self, mask: None = None, probability: None = None) -> np.ndarray:
        return np.concatenate((self.continuous.sample(), self.discrete.sample()), dtype=np.float32)

    def contains(self, x: Any) -> bool:
        if not isinstance(x, np.ndarray) or x.shape != self.shape or x.dtype != np.float32:
            return False
        index = x[self.size :]
        exists = (index == np.floor(index)) & (index >= 0) & (index < self.discrete.nvec)
        return self.continuous.contains(x[: self.size]) and bool(exists.all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hybrid) and (self.continuous, self.discrete) == (other.continuous, other.discrete)

    def __repr__(self) -> str:
        return f"Hybrid({self.continuous}, {self.discrete})"

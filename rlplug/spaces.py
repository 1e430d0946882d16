"""A space of actions that Gymnasium lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiDiscrete, Space


class Mixed(Space[np.ndarray]):
    """Numbers and choices as one vector: ``N`` numbers, then the indices of ``C`` choices, ``[N + C]`` float32.

    An action space with continuous and with discrete parts is this one inside, whatever the environment's own looks
    like. float32 holds indices up to 2^24 exactly.

    Args:
        numbers: float32 ``[N]``.
        choices: ``[C]``, from 0.

    Raises:
        ValueError: one of them is not such a space.
    """

    def __init__(self, numbers: Box, choices: MultiDiscrete) -> None:
        if not isinstance(numbers, Box) or len(numbers.shape) != 1 or numbers.dtype != np.float32:
            raise ValueError(f"the numbers are {numbers}; give a float32 Box [N]")
        if not isinstance(choices, MultiDiscrete) or choices.nvec.ndim != 1 or np.any(choices.start):
            raise ValueError(f"the choices are {choices}; give a MultiDiscrete [C] that counts from 0")
        self.numbers, self.choices, self.size = numbers, choices, int(numbers.shape[0])
        super().__init__((self.size + len(choices.nvec),), np.float32)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def is_bounded(self) -> bool:
        """Return whether all numbers are bounded on both sides."""
        return self.numbers.is_bounded()

    def seed(self, seed: int | None = None) -> Any:
        first = super().seed(seed)
        for part in (self.numbers, self.choices):
            part.seed(int(self.np_random.integers(2**31)))
        return first

    def sample(self, mask: None = None, probability: None = None) -> np.ndarray:
        return np.concatenate((self.numbers.sample(), self.choices.sample()), dtype=np.float32)

    def contains(self, x: Any) -> bool:
        if not isinstance(x, np.ndarray) or x.shape != self.shape or x.dtype != np.float32:
            return False
        numbers, choices = x[: self.size], x[self.size :]
        return self.numbers.contains(numbers) and bool(((choices == np.floor(choices)) & self._exists(choices)).all())

    def _exists(self, choices: np.ndarray) -> np.ndarray:
        return (choices >= 0) & (choices < self.choices.nvec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and (self.numbers, self.choices) == (other.numbers, other.choices)

    def __repr__(self) -> str:
        return f"Mixed({self.numbers}, {self.choices})"

"""Replay of overlapping sequences with stored recurrent states (R2D2, Kapturowski et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlplug.plugins.buffer.prioritized import Priorities, Prioritized
from rlplug.plugins.buffer.storage import Ring
from rlplug.settings import settings
from rlplug.types import ConfigError


class Sequence(Prioritized):
    """Windows of ``burn_in + window`` transitions that begin at every ``carry_stride``-th row of a column.

    Windows overlap, but a row is kept once. A sample has the state before its first row, ``carry [1, B, ...]``. A
    window may run over the ends of episodes, where ``is_first`` clears the state. One without a valid row behind
    its burn-in is never drawn.
    """

    sequences: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ("priority", "carry")

    @settings
    class Config(Priorities):
        pass

    def _stride(self) -> int:
        if self.ctx.needs.carry_stride:
            return self.ctx.needs.carry_stride
        raise ConfigError(
            "buffer", "sequence keeps the states of recurrent models, but none was chosen; take buffer=prioritized"
        )

    def _drawable(self, ring: Ring, window: Any) -> Any:
        learned = np.arange(self.ctx.needs.burn_in, self.window)
        return ring.valid[(window[:, None] * self.stride + learned) % ring.rows].any(1)

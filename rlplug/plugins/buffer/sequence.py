"""Replay of overlapping sequences with stored recurrent states (R2D2, Kapturowski et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlplug.api import Context
from rlplug.buffer import Ring
from rlplug.plugins.buffer.prioritized import Prioritized
from rlplug.types import ConfigError


class Sequence(Prioritized):
    """Windows of ``burn_in + window`` transitions that begin at every ``stride``-th row of a column.

    Windows overlap, but each row is stored once. A sample has the state before its first row, ``carry [1, B, ...]``. A
    window may span several episodes; ``is_first`` clears the state. A window without a valid row after its burn-in is
    never sampled. If rows have an initial ``priority``, a window gets the largest one after its burn-in.
    """

    sequences: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ("priority", "carry")

    def _stride(self, ctx: Context) -> int:
        if ctx.needs.window.stride:
            return ctx.needs.window.stride
        raise ConfigError("buffer", "sequence stores recurrent states, but the model has none; use buffer=prioritized")

    def _learned(self, window: Any) -> Any:
        """Return the rows of windows ``[n]`` to train on, ``[n, length]``: neither burn-in nor bootstrap rows."""
        learned = np.arange(self.ctx.needs.window.burn_in, self.window - self.ctx.needs.window.lookahead)
        return window[:, None] * self.stride + learned

    def _drawable(self, ring: Ring, window: Any) -> Any:
        return ring.valid[self._learned(window) % ring.rows].any(1)

    def _first_priority(self, ring: Ring, window: Any) -> Any:
        priority = super()._first_priority(ring, self._learned(window))
        return None if priority is None else priority.max(1)

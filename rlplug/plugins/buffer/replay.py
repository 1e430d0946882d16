"""Uniform experience replay over streams of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Context, Data, RowLog, Segment
from rlplug.plugins.buffer.storage import Ring, Storage
from rlplug.settings import settings
from rlplug.types import Batch


class Replay:
    """A ring of ``R`` rows by ``B`` columns, sampled uniformly over its valid transitions.

    The insertion ids of valid rows stand in a list of their own, in order, so that a draw is exactly uniform
    whatever the share of final observations.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"windows"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"

    @settings
    class Config(Storage):
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.ctx = ctx
        self.columns = len(ctx.env_ids)
        self.window = ctx.needs.burn_in + ctx.needs.window
        self.batch_size = ctx.batch_size // ctx.world_size
        self.ring = Ring(cfg, ctx, self.window)
        self._ids = self._below = np.zeros(0, np.int64)

    @property
    def device(self) -> torch.device:
        """Where rows are kept."""
        return self.ring.device

    def add(self, segment: Segment) -> None:
        """Rows 0..T-1 are closed, row T waits for its action at the next ``add``.

        Raises:
            RunError: observations are no stacks, though the environment says so.
        """
        ring = self.ring
        if not ring:
            self._allocate()
        valid, written, start = segment.batch["valid"][:-1].numpy(), ring.written, ring.written % ring.rows
        ring.write(segment.batch)
        below = self._below[start]
        if len(valid) == 1:  # the usual case off-policy, and it runs once per environment step
            new = valid[0].nonzero()[0]
            self._below[(start + 1) % ring.rows] = below + len(new)
        else:
            new = valid.reshape(-1).nonzero()[0]
            self._below[(start + 1 + np.arange(len(valid))) % ring.rows] = below + valid.sum(1).cumsum()
        self._ids[(below + np.arange(len(new))) % len(self._ids)] = written * self.columns + new

    def _allocate(self) -> None:
        self._ids = np.zeros(self.ring.rows * self.columns, np.int64)
        self._below = np.zeros(self.ring.rows, np.int64)  # valid ids in all rows before the one that lies there

    def _range(self) -> tuple[int, int]:
        """Which valid ids, counted from the beginning of the run, may be drawn: [low, high)."""
        ring = self.ring
        if not ring.written:
            return 0, 0
        oldest = ring.oldest
        newest = max(oldest, ring.written - self.window + 1)
        return int(self._below[oldest % ring.rows]), int(self._below[newest % ring.rows])

    def __len__(self) -> int:
        low, high = self._range()
        return high - low

    def ready(self) -> bool:
        return len(self) > 0

    def sample(self) -> Batch:
        """``[window + 1, B]`` with ``index [B]``; every first row is valid."""
        low, high = self._range()
        drawn = self.ctx.randint(high - low, self.batch_size).cpu().numpy()
        ids = self._ids[(low + drawn) % len(self._ids)]
        batch = self.ring.read(*np.divmod(ids, self.columns), self.window)
        batch["index"] = torch.from_numpy(ids)
        batch["sample_prob"] = torch.full((self.batch_size,), 1.0 / (high - low))
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Uniform replay has no priorities."""

    def nbytes(self, row: Batch) -> int:
        return self.ring.nbytes(row) + 8 * self.ring.rows * (self.columns + 1)

    def save(self, log: RowLog) -> None:
        """Closed rows are stored once; the open row, which the next ``add`` overwrites, each time."""
        self.ring.save(log)

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        ring = self.ring
        ring.load(log)
        self._allocate()
        rows = np.arange(ring.first, ring.written + 1)
        valid: Any = ring.valid[rows[:-1] % ring.rows]
        self._below[rows % ring.rows] = np.concatenate([[0], valid.sum(1).cumsum()])  # counted from the oldest row
        new = valid.reshape(-1).nonzero()[0]
        self._ids[: len(new)] = ring.first * self.columns + new

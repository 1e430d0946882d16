"""Uniform experience replay over streams of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Context, Data, RowLog, Segment
from rlplug.plugins.buffer.options import Storage
from rlplug.plugins.buffer.shards import Rings, check_feedback
from rlplug.plugins.buffer.storage import Ring
from rlplug.settings import settings
from rlplug.types import Batch


class Numbered(Ring):
    """A ring that keeps the insertion ids of its valid rows in a list of their own, in order.

    So a draw is exactly uniform whatever the share of final observations.
    """

    ids: Any
    below: Any
    """valid ids in all rows before the one that lies there"""

    def allocate(self) -> None:
        self.ids = np.zeros(self.rows * self.columns, np.int64)
        self.below = np.zeros(self.rows, np.int64)


class Replay:
    """A ring of ``R`` rows by ``B`` columns for every shard, sampled uniformly over the valid transitions of all."""

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
        self.rings = Rings(Numbered, cfg, ctx, self.window)

    @property
    def device(self) -> torch.device:
        """Where rows are kept."""
        return self.rings.device

    def add(self, segment: Segment) -> None:
        """Rows 0..T-1 are closed, row T waits for its action at the next ``add``.

        Raises:
            RunError: observations are no stacks, though the environment says so.
        """
        ring = self.rings.of(segment)
        if not ring:
            ring.allocate()
        valid, written, start = segment.batch["valid"][:-1].numpy(), ring.written, ring.written % ring.rows
        ring.write(segment.batch)
        below = ring.below[start]
        if len(valid) == 1:  # the usual case off-policy, and it runs once per environment step
            new = valid[0].nonzero()[0]
            ring.below[(start + 1) % ring.rows] = below + len(new)
        else:
            new = valid.reshape(-1).nonzero()[0]
            ring.below[(start + 1 + np.arange(len(valid))) % ring.rows] = below + valid.sum(1).cumsum()
        ring.ids[(below + np.arange(len(new))) % len(ring.ids)] = self._insertion_ids(ring, written, new)

    def _insertion_ids(self, ring: Numbered, row: int, place: Any) -> Any:
        """Return the ids of the places ``place [n]`` behind the beginning of row ``row`` of a ring."""
        if ring.columns == self.columns:
            return row * self.columns + place
        behind, column = np.divmod(place, ring.columns)
        return (row + behind) * self.columns + ring.begin + column

    def _range(self, ring: Numbered) -> tuple[int, int]:
        """Return which valid ids of a ring, counted from the beginning of the run, may be drawn: [low, high)."""
        if not ring.written:
            return 0, 0
        oldest = ring.oldest
        newest = max(oldest, ring.written - self.window + 1)
        return int(ring.below[oldest % ring.rows]), int(ring.below[newest % ring.rows])

    def __len__(self) -> int:
        return sum(high - low for low, high in map(self._range, self.rings))

    def ready(self) -> bool:
        return len(self) > 0

    def sample(self) -> Batch:
        """``[window + 1, B]`` with ``index [B]``; every first row is valid."""
        ranges, below = [(ring, *self._range(ring)) for ring in self.rings], 0
        total = sum(high - low for _, low, high in ranges)
        drawn = self.ctx.randint(total, self.batch_size).cpu().numpy()
        ids = np.empty_like(drawn)
        for ring, low, high in ranges:
            mine = slice(None) if len(ranges) == 1 else (drawn >= below) & (drawn < below + high - low)
            ids[mine] = ring.ids[(low + drawn[mine] - below) % len(ring.ids)]
            below += high - low
        batch = self.rings.read(*np.divmod(ids, self.columns), self.window)
        batch["index"] = torch.from_numpy(ids)
        batch["sample_prob"] = torch.full((self.batch_size,), 1.0 / total)
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Ignore priorities: every draw is uniform.

        Raises:
            RunError: something else is fed back.
        """
        check_feedback(self, values, ("priority",))

    def nbytes(self, row: Batch) -> int:
        return self.rings.nbytes(row) + 8 * self.rings.rows * (self.columns + 1)

    def save(self, log: RowLog) -> None:
        """Closed rows are stored once; the open row, which the next ``add`` overwrites, each time."""
        self.rings.save(log)

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self.rings.load(log)
        for ring in self.rings:
            ring.allocate()
            rows = np.arange(ring.first, ring.written + 1)
            valid: Any = ring.valid[rows[:-1] % ring.rows]
            ring.below[rows % ring.rows] = np.concatenate([[0], valid.sum(1).cumsum()])  # counted from the oldest row
            new = valid.reshape(-1).nonzero()[0]
            ring.ids[: len(new)] = self._insertion_ids(ring, ring.first, new)

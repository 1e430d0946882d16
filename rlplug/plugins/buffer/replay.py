"""Uniform experience replay over streams of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlplug.buffer import Ring, Windows
from rlplug.types import Batch


class Numbered(Ring):
    """A ring that lists the insertion ids of its valid rows in order.

    So sampling is exactly uniform for any fraction of final observations.
    """

    ids: Any
    below: Any
    """number of valid ids in all rows before the one at this place"""
    drawable: tuple[int, int] = (0, 0)
    """range of valid ids that can be sampled, counted from the start of the run: [low, high)"""

    def allocate(self, like: Batch) -> None:
        super().allocate(like)
        self.ids = np.zeros(self.rows * self.columns, np.int64)
        self.below = np.zeros(self.rows, np.int64)


class Replay(Windows[Numbered]):
    """A ring of ``R`` rows by ``B`` columns for every shard, sampled uniformly over the valid transitions of all."""

    ring = Numbered

    def added(self, ring: Numbered, first: int) -> None:
        start, length = first % ring.rows, ring.written - first
        below = ring.below[start]
        if length == 1:  # the common off-policy case, once per environment step
            new = ring.valid[start].nonzero()[0]
            ring.below[(start + 1) % ring.rows] = below + len(new)
        else:
            valid = ring.valid[(first + np.arange(length)) % ring.rows]
            new = valid.reshape(-1).nonzero()[0]
            ring.below[(start + 1 + np.arange(length)) % ring.rows] = below + valid.sum(1).cumsum()
        ring.ids[(below + np.arange(len(new))) % len(ring.ids)] = self._insertion_ids(ring, first, new)
        ring.drawable = self._range(ring)

    def _insertion_ids(self, ring: Numbered, row: int, place: Any) -> Any:
        """Return the ids at offsets ``place [n]`` from the start of row ``row`` of a ring."""
        if ring.columns == self.columns:
            return row * self.columns + place
        behind, column = np.divmod(place, ring.columns)
        return (row + behind) * self.columns + ring.begin + column

    def _range(self, ring: Numbered) -> tuple[int, int]:
        """Return the range of a ring's valid ids that can be sampled."""
        oldest = ring.oldest
        newest = max(oldest, ring.written - self.window + 1)
        return int(ring.below[oldest % ring.rows]), int(ring.below[newest % ring.rows])

    def __len__(self) -> int:
        return sum(ring.drawable[1] - ring.drawable[0] for ring in self.rings)

    def draw(self) -> tuple[Any, Any, Batch]:
        total = len(self)
        ids = self._ids(self.ctx.randint(total, self.batch_size, host=True).numpy())
        prob = np.full(self.batch_size, 1.0 / total, np.float32)
        drawn = {"index": torch.from_numpy(ids), "sample_prob": torch.from_numpy(prob)}
        return *np.divmod(ids, self.columns), drawn

    def _ids(self, number: Any) -> Any:
        """Return the ids at positions ``[n]`` among those that can be sampled, counted over all rings."""
        rings = [*self.rings]
        if len(rings) == 1:
            return rings[0].ids.take(rings[0].drawable[0] + number, mode="wrap")
        ids, below = np.empty_like(number), 0
        for ring in rings:
            low, high = ring.drawable
            mine = (number >= below) & (number < below + high - low)
            ids[mine] = ring.ids.take(low + number[mine] - below, mode="wrap")
            below += high - low
        return ids

    def nbytes(self, row: Batch) -> int:
        return super().nbytes(row) + 8 * self.rings.rows * (self.columns + 1)

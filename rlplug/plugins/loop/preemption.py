"""Preemption of stragglers: Wijmans et al. 2020 (arXiv:1911.00357), section 3."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import Store

FINISHED = "finished"
LOOK_S = 0.01
"""seconds between polls of the store, each of which takes 0.1 ms"""


class Preemptor:
    """Ends this rank's rollout when enough other ranks have finished theirs.

    Finished rollouts are counted in a store, without a blocking collective. All ranks synchronize after every round (to
    sum their steps), so earlier counts belong to earlier rounds.

    Args:
        store: empty store of all ranks.
        ranks: number of ranks.
        threshold: fraction of the other ranks that must have finished, at least one rank.
        least: minimum fraction of its rollout that a rank plays, at least one row.
    """

    def __init__(self, store: Store, ranks: int, threshold: float, least: float) -> None:
        self.store, self.ranks, self.least = store, ranks, least
        self.enough = max(1, math.ceil(round(threshold * (ranks - 1), 9)))
        self._before = 0  # rollouts of earlier rounds
        self._ordered = self._played = 0  # rows since ``drain``

    @contextmanager
    def rollout(self, rows: int) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether to stop before the next row; leaving the block finishes the rollout."""
        asked, look_at, stopped = 0, 0.0, False

        def stop() -> bool:
            nonlocal asked, look_at, stopped
            if asked >= max(1.0, self.least * rows) and time.monotonic() >= look_at:
                stopped = self.store.add(FINISHED, 0) - self._before >= self.enough
                look_at = time.monotonic() + LOOK_S
            asked += not stopped
            return stopped

        yield stop
        self.store.add(FINISHED, 1)
        self._before += self.ranks
        self._ordered, self._played = self._ordered + rows, self._played + (asked if stopped else rows)

    def drain(self) -> dict[str, float]:
        """Return the fraction of requested rows not played since the last call."""
        share = 1.0 - self._played / self._ordered if self._ordered else 0.0
        self._ordered = self._played = 0
        return {"preempted": share}

"""Ranks that do not wait for the slowest: Wijmans et al. 2020 (arXiv:1911.00357), section 3."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store, distributed_c10d

FINISHED = "finished"
LOOK_S = 0.01
"""seconds between two looks at the others, each of which takes a tenth of a millisecond"""
_stores = itertools.count()


def shared_store() -> Store:
    """Return a store of this run's ranks, which all of them have to ask for equally often: the n-th is the same."""
    return PrefixStore(f"rlplug/{next(_stores)}", distributed_c10d._get_default_store())


class Preemptor:
    """Ends this rank's rollout when enough of the others have finished theirs.

    Finished rollouts are counted in a store: no collective, so nobody waits. Behind every round all ranks meet (they
    add up their steps), so whatever was counted before is of earlier rounds.

    Args:
        store: of all ranks, and empty.
        ranks: how many they are.
        threshold: share of the other ranks that have to be finished, one at least.
        least: share of its rollout that a rank plays in any case, one row at least.
    """

    def __init__(self, store: Store, ranks: int, threshold: float, least: float) -> None:
        self.store, self.ranks, self.least = store, ranks, least
        self.enough = max(1, math.ceil(round(threshold * (ranks - 1), 9)))
        self._before = 0  # rollouts of earlier rounds
        self._ordered = self._played = 0  # rows, since ``drain``

    @contextmanager
    def rollout(self, rows: int) -> Iterator[Callable[[], bool]]:
        """Yield what is asked before every row whether to stop; the rollout is finished when the block is left."""
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
        """Return the share of the ordered rows that were not played since the last call."""
        share = 1.0 - self._played / self._ordered if self._ordered else 0.0
        self._ordered = self._played = 0
        return {"preempted": share}

"""Which rank holds which of the run's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from rlplug import tree
from rlplug.api import Collector
from rlplug.collection.broadcast import BroadcastCollector
from rlplug.trainer.collectives import Collectives
from rlplug.types import Tree

T = TypeVar("T")


class Placement:
    """Data in as many parts as there are ranks, or in one part that all of them hold.

    Args:
        replicated: the first rank collects for all, and every rank holds all data.
    """

    def __init__(self, ranks: Collectives, replicated: bool = False) -> None:
        self.ranks = ranks
        self.part, self.parts = (0, 1) if replicated else (ranks.rank, ranks.world_size)
        self.collects = self.part == ranks.rank  # whether this rank collects its part

    def share(self, n: int) -> slice:
        """Return this part's share of ``n`` items."""
        return slice(n * self.part // self.parts, n * (self.part + 1) // self.parts)

    def collector(self, make: Callable[[], Collector]) -> Collector:
        """Return what gives this rank its part: what ``make`` returns, or what brings it from the first rank."""
        if self.parts == self.ranks.world_size:
            return make()
        return BroadcastCollector(make() if self.collects else None, self.ranks.broadcast)

    def exchange(self, x: T) -> list[T]:
        """Return what was given for every part, in order; ``x`` can be pickled."""
        return self.ranks.exchange(x) if self.parts > 1 else [x]

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x [n, ...]`` of all parts, one after another; ``n`` may differ."""
        return self.ranks.gather(x) if self.parts > 1 else x

    def merge(self, values: Tree) -> Tree:
        """Return what was learned of rows of this part, ``[B]`` or ``[T, B, ...]``, on all ranks that hold it."""
        ranks = self.ranks
        if self.parts == ranks.world_size:
            return values
        return tree.map(lambda x: ranks.gather_columns(x.to(ranks.fabric.device)), values)

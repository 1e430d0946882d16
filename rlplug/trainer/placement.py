"""Placement of a run's data on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from rlplug import tree
from rlplug.api import Collector
from rlplug.collection.broadcast import BroadcastCollector
from rlplug.distributed.collectives import Collectives
from rlplug.types import Tree

T = TypeVar("T")


class Placement:
    """Placement of data: one part per rank, or one part that all ranks hold.

    Args:
        replicated: rank 0 collects for all, and every rank holds all data.
    """

    def __init__(self, ranks: Collectives, replicated: bool = False) -> None:
        self.ranks = ranks
        self.part, self.parts = (0, 1) if replicated else (ranks.rank, ranks.world_size)
        self.collects = self.part == ranks.rank  # whether this rank collects its part

    def share(self, n: int) -> slice:
        """Return this part's share of ``n`` items."""
        return slice(n * self.part // self.parts, n * (self.part + 1) // self.parts)

    def collector(self, make: Callable[[], Collector]) -> Collector:
        """Return this rank's collector: that of ``make``, or one that receives the data of rank 0."""
        if self.parts == self.ranks.world_size:
            return make()
        return BroadcastCollector(make() if self.collects else None, self.ranks.broadcast)

    def exchange(self, x: T) -> list[T]:
        """Return the ``x`` of every part, in order; it must be picklable."""
        return self.ranks.exchange(x) if self.parts > 1 else [x]

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate ``x [n, ...]`` of all parts, in order; ``n`` may differ."""
        return self.ranks.gather(x) if self.parts > 1 else x

    def merge(self, values: Tree) -> Tree:
        """Concatenate feedback on rows of this part, ``[B]`` or ``[T, B, ...]``, over the ranks that hold it."""

        def side_by_side(x: Tensor) -> Tensor:
            axis = min(1, x.ndim - 1)
            own = x.to(self.ranks.fabric.device).transpose(0, axis)
            return self.ranks.gather(own).transpose(0, axis)

        return values if self.parts == self.ranks.world_size else tree.map(side_by_side, values)

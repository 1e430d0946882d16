"""Collection if ranks cannot share the environments equally: rank 0 collects, and all ranks hold the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from rlplug.api import Collector, Job, Rollout, Segment, SegmentSpec
from rlplug.host import on_cpu
from rlplug.types import Batch, NamedWeights, Tree


class BroadcastCollector(Collector):
    """Broadcasts the segments of rank 0 to every rank.

    Args:
        own: collector of rank 0; None on the others.
        broadcast: returns the argument of rank 0 on every rank.
    """

    def __init__(self, own: Collector | None, broadcast: Callable[[Any], Any]) -> None:
        self.own, self.broadcast = own, broadcast

    @cached_property
    def spec(self) -> SegmentSpec:
        return self.broadcast(self.own.spec if self.own else None)

    @cached_property
    def in_flight(self) -> list[int | None]:
        return self.broadcast([*self.own.in_flight] if self.own else None)

    def start(self) -> None:
        if self.own:
            self.own.start()

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        if self.own:
            self.own.submit(rollout, shards)
        self._count(shards, 1)

    def poll(self, shards: int | None = None) -> list[Segment]:
        own = self.own.poll(shards) if self.own else []
        segments = self.broadcast([replace(segment, batch=on_cpu(segment.batch)) for segment in own])
        self._count(None if shards is None else [segment.shard for segment in segments], -1)
        return segments

    def play(self, jobs: Sequence[Job], weights: NamedWeights) -> Iterator[tuple[int, Batch]]:
        played = self.own.play(jobs, weights) if self.own else None
        for _ in jobs:
            yield self.broadcast(next(played) if played else None)

    def _count(self, shards: Sequence[int] | None, change: int) -> None:
        for shard in range(len(self.in_flight)) if shards is None else shards:
            self.in_flight[shard] = (self.in_flight[shard] or 0) + change

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the collector, on rank 0 only."""
        return self.own.metrics() if self.own else {}

    def episode_metrics(self) -> list[dict[str, float]]:
        return self.own.episode_metrics() if self.own else []

    def state(self) -> Tree:
        return self.own.state() if self.own else None

    def load(self, state: Tree) -> None:
        vars(self).pop("in_flight", None)
        if self.own:
            self.own.load(state)

    def close(self) -> None:
        if self.own:
            self.own.close()

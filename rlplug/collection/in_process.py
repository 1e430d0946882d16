"""Collector in the learner's process: one shard, which plays a rollout when it is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

from rlplug import tree
from rlplug.api import Collector, Job, Preemption, Rollout, Segment, SegmentSpec
from rlplug.collection.acting import acting_state
from rlplug.collection.play import Player
from rlplug.host import copied
from rlplug.types import Batch, NamedWeights, Progress, RunError, Tree, Weights


@dataclass(eq=False)
class InProcessCollector(Collector):
    """Plays rollouts with the learner's module.

    Args:
        jobs: plays whole episodes; None: a dataset without an environment.
        keeps_weights: copy weights, because rollouts may use older ones than the learner's.
        preemption: ends a rollout when enough other ranks have finished theirs; None: rollouts are never cut short.
    """

    player: Any
    jobs: Player | None
    progress: Progress
    keeps_weights: bool = False
    preemption: Preemption | None = None
    _played: list[Segment] = field(default_factory=list[Segment])
    _weights: tuple[int, Weights | None] = (-1, None)  # version and copy

    @cached_property
    def spec(self) -> SegmentSpec:
        return self.player.spec

    @property
    def in_flight(self) -> Sequence[int | None]:
        return [len(self._played)]

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        if self.keeps_weights and rollout.version != self._weights[0]:
            weights, _ = acting_state(self.player.algorithm)
            self._weights = rollout.version, {name: x.clone() for name, x in weights.items()}
        for segment in self._played[-1:]:  # its memory is about to be overwritten
            segment.batch = copied(segment.batch)
        rows, steps, weights = rollout.num_steps, self.progress.env_steps, self._weights[1]
        with self.preemption.rollout(rows) if self.preemption else nullcontext() as stop:
            batch = self.player.collect(rows, rollout.mode, stop, weights, steps, rollout.tasks)
        self._played.append(Segment(batch, self.spec.shards[0], 0, rollout.version, rollout.version_steps))

    def poll(self, shards: int | None = None) -> list[Segment]:
        return [self._played.pop(0)]

    def play(self, jobs: Sequence[Job], weights: NamedWeights) -> Iterator[tuple[int, Batch]]:
        if self.jobs is None:
            raise RunError("a dataset cannot run jobs; this loop needs an environment: data.path=null")
        yield from enumerate(self.jobs.play_all(jobs, weights))

    def metrics(self) -> dict[str, float]:
        """Return the fraction of submitted rows not played since the last call, if ranks are preempted."""
        return self.preemption.drain() if self.preemption else {}

    def episode_metrics(self) -> list[dict[str, float]]:
        return [own for _, own in self.player.episode_metrics() if own]

    def state(self) -> Tree:
        played = [(segment.batch, segment.version, segment.version_steps) for segment in self._played]
        return self.player.state() | {"played": played, "weights": self._weights}

    def load(self, state: Tree) -> None:
        self.player.load(state)
        row, self._played = self.spec.row, list[Segment]()
        for batch, version, steps in state["played"]:
            rows = next((len(x) for x in tree.leaves(batch) if getattr(x, "ndim", 0)), 0)
            own = tree.map(lambda x, rows=rows: x.expand(rows, *x.shape), row)
            tree.check_like(own, tree.only(batch, row), "collector.played", exact=True)
            self._played.append(Segment(batch, self.spec.shards[0], 0, index(version), index(steps)))
        version, weights = state["weights"]
        if weights is not None:
            own, _ = acting_state(self.player.algorithm)
            tree.check_like(own, weights, "collector.weights", exact=True)
            weights = {name: x.to(own[name].device) for name, x in weights.items()}
        self._weights = index(version), weights

    def close(self) -> None:
        self.player.close()
        if self.jobs is not None:
            self.jobs.close()

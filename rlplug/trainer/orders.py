"""Which rollouts are ordered of a collector, and how old the weights are that play them."""

from __future__ import annotations

import math
import sys

from rlplug.api import Collector, Loop, Rollout, Segment
from rlplug.context import RunContext
from rlplug.types import Mode, Progress, Tree


class Orders:
    """Orders the rollouts of a rank as ``Loop.tempo`` says, within ``total_steps``."""

    def __init__(self, loop: Loop, ctx: RunContext, progress: Progress) -> None:
        self.loop, self.tempo, self.ctx, self.progress = loop, loop.tempo, ctx, progress
        self._round_envs = self._num_envs = ctx.num_envs  # of all ranks
        self._is_async = False  # whether weights may be older than the learner's
        self._rounds, self._shard_steps = 0, 0  # that were ordered of the weights' version
        self._version_steps = 0  # environment steps of the run when it changed

    @property
    def steps_left(self) -> int:
        """Steps of every environment of a round until ``total_steps``, which is never exceeded if it counts steps."""
        if self.loop.unit == "updates":
            return sys.maxsize * (self.progress.updates < self.ctx.total_steps)
        return (self.ctx.total_steps - self.progress.env_steps) // self._round_envs

    def submit(self, collector: Collector, mode: Mode) -> int | None:
        """Order a round, and what the loop wants ahead of it; return the segments of a round, None: one of all shards.

        What is ordered always comes out as whole rounds, so that ranks never wait for each other in vain.
        """
        total, length, tempo = len(collector.spec.shards), self.ctx.rollout_length, self.tempo
        per_shard, count = len(self.ctx.env_ids) // total, min(tempo.shards or total, total)
        self._round_envs = self._num_envs * count // total
        self._is_async = tempo.in_flight > 1 or tempo.broadcast_interval > 1 or count < total
        most = self.steps_left // length * count
        if not most:
            most, length = count, self.steps_left
        for ahead in range(1, 1 + (tempo.in_flight if mode == "explore" else 1)):
            in_flight = {shard: n for shard, n in enumerate(collector.in_flight) if n is not None}
            idle = [shard for shard, n in in_flight.items() if n < ahead][: max(0, most - sum(in_flight.values()))]
            if idle:
                version = self._version(length * per_shard * len(idle) / total)
                collector.submit(Rollout(length, mode, version, self._version_steps), idle)
        return tempo.shards and count

    def _version(self, steps: float) -> int:
        """Return the version of the weights for the next rollouts: the newest, or the last one while it may serve.

        Args:
            steps: that these are for an actor, on average.
        """
        limit = self.tempo.max_weight_sync_delay or math.inf
        due = self._rounds >= self.tempo.broadcast_interval or self._shard_steps >= limit
        if due and self.progress.version != self.progress.updates:
            self.progress.version, self._rounds, self._shard_steps = self.progress.updates, 0, 0
            self._version_steps = self.progress.env_steps
        self._rounds, self._shard_steps = self._rounds + 1, self._shard_steps + steps
        return self.progress.version

    def ages(self, segment: Segment) -> dict[str, float]:
        """Return how old a segment's weights are, in updates and in environment steps, and whether that is too old.

        Empty where the weights of segments are always the newest.
        """
        if not self._is_async:
            return {}
        updates, limit = self.progress.updates - segment.version, self.tempo.max_staleness
        ages: dict[str, float] = {
            "staleness": updates,
            "staleness_steps": self.progress.env_steps - segment.version_steps,
        }
        return ages if limit is None else ages | {"too_stale": updates > limit}

    def state(self) -> Tree:
        return self._rounds, self._shard_steps, self._version_steps

    def load(self, state: Tree) -> None:
        self._rounds, self._shard_steps, self._version_steps = state

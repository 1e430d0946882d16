"""Requests for rollouts, and the versions of the weights that play them."""

from __future__ import annotations

import math
import sys

from rlplug.api import Collector, Loop, Rollout, Segment
from rlplug.context import RunContext
from rlplug.types import Mode, Progress, Tree


class Orders:
    """Submits the rollouts of a rank according to ``Loop.tempo``, within ``total_steps``."""

    def __init__(self, loop: Loop, ctx: RunContext, progress: Progress) -> None:
        self.loop, self.tempo, self.ctx, self.progress = loop, loop.tempo, ctx, progress
        self._round_envs = self._num_envs = ctx.num_envs  # summed over ranks
        self._is_async = False  # whether weights may be older than the learner's
        self._rounds, self._shard_steps = 0, 0  # submitted with the weights' current version
        self._version_steps = 0  # environment steps of the run at that version

    @property
    def steps_left(self) -> int:
        """Return the steps left per environment of a round; ``total_steps`` in environment steps is never exceeded."""
        if self.loop.unit == "updates":
            return sys.maxsize * (self.progress.updates < self.ctx.total_steps)
        return (self.ctx.total_steps - self.progress.env_steps) // self._round_envs

    def submit(self, collector: Collector, mode: Mode, tasks: Tree = None) -> int | None:
        """Submit a round and rollouts in advance; return the segments of a round (None: one from all shards).

        Requests always add up to whole rounds, so that ranks do not deadlock.
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
                collector.submit(Rollout(length, mode, version, self._version_steps, tasks), idle)
        return tempo.shards and count

    def _version(self, steps: float) -> int:
        """Return the version of the weights for the next rollouts: the last one if recent enough, else the newest.

        Args:
            steps: average steps of these rollouts per actor.
        """
        limit = self.tempo.max_weight_sync_delay or math.inf
        due = self._rounds >= self.tempo.broadcast_interval or self._shard_steps >= limit
        if due and self.progress.version != self.progress.updates:
            self.progress.version, self._rounds, self._shard_steps = self.progress.updates, 0, 0
            self._version_steps = self.progress.env_steps
        self._rounds, self._shard_steps = self._rounds + 1, self._shard_steps + steps
        return self.progress.version

    def ages(self, segment: Segment) -> dict[str, float]:
        """Return the staleness of a segment's weights, in updates and in environment steps, and whether it is too high.

        Empty if segments always have the newest weights.
        """
        if not self._is_async:
            return {}
        steps, limit = self.progress.env_steps - segment.version_steps, self.tempo.max_staleness
        ages: dict[str, float] = {"staleness": self.progress.updates - segment.version, "staleness_steps": steps}
        return ages if limit is None else ages | {"too_stale": ages["staleness"] > limit}

    def state(self) -> Tree:
        return self._rounds, self._shard_steps, self._version_steps

    def load(self, state: Tree) -> None:
        self._rounds, self._shard_steps, self._version_steps = state

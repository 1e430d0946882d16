"""What a loop drives: collection, updates, and reports between rounds."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pluggy
import torch

from rlplug.api import Collector, Job, Losses, Rollout, Run, Segment
from rlplug.collection.episodes import Episodes
from rlplug.collection.nonfinite import beyond, check_segment
from rlplug.collection.play import OF_EPISODE
from rlplug.collection.segment import on_cpu
from rlplug.context import ResolvedRun
from rlplug.registry import Events
from rlplug.trainer.gradients import parts
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.metrics import Clock, Means
from rlplug.trainer.policy import Policy
from rlplug.types import Batch, Mode, RunError, Tree, Weights

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GOES_ON = "the run goes on, and says so once (env.check_bounds=false: never)"


class Reports(Protocol):
    """What a run reports between rounds; see ``run.callbacks``."""

    identity: str

    @property
    def logged(self) -> int: ...
    def ready_to_save(self) -> bool: ...
    def report(self, trainer: Trainer) -> None: ...
    def close(self) -> None: ...


class Trainer(Run):
    """``api.Run``, and nothing else. It is given everything it works with; ``run.build`` makes that."""

    def __init__(
        self,
        *,
        resolved: ResolvedRun,
        run_dir: Path,
        policy: Policy,
        collector: Collector,
        learner: RankLearner,
        reports: Reports,
    ) -> None:
        self.resolved, self.config, self.loop = resolved, resolved.config, resolved.loop
        self.run_dir, self.policy, self.ctx, self.algorithm = run_dir, policy, policy.ctx, policy.algorithm
        self.learner: RankLearner = learner
        self.buffer, self.progress, self.collector, self.reports = learner.buffer, learner.progress, collector, reports
        self.clock, self.means, self.episodes = Clock(), Means(), Episodes(len(self.ctx.env_ids), self.ctx.spec.nested)
        self._closing: list[Any] = [reports, collector]
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)
        self._round_envs = self.config.num_envs  # of all ranks
        self._rounds, self._shard_steps = 0, 0  # that were ordered of the weights' version
        self._version_steps = 0  # environment steps of the run when it changed
        self.stop_signal = 0  # the signal that asked this process to stop; 0: none did
        self.stop_error: RunError | None = None  # that a logger asked to stop with
        self.agreed_stop = 0  # the signal that ends the run, once all ranks know
        self.may_checkpoint = False  # whether the first rank can write a checkpoint after this round
        self._told_beyond = False  # whether a person was told of observations out of bounds
        self._in_agreement = False  # whether the ranks agreed on these two since the last report

    @property
    def logged(self) -> int:
        return self.reports.logged

    @property
    def steps(self) -> int:
        return getattr(self.progress, self.loop.unit)

    def request_stop(self, signal_number: int, error: RunError | None = None) -> None:
        """End the run after this round, by the first ``error`` if there is one; 0 takes that back."""
        self.stop_signal, self.stop_error = signal_number, self.stop_error or error
        if self.learner.collectives.world_size == 1:
            self.agreed_stop = signal_number

    @property
    def _steps_left(self) -> int:
        """Steps of every environment of a round until ``total_steps``, which is never exceeded if it counts steps."""
        if self.loop.unit == "updates":
            return sys.maxsize * (self.steps < self.config.total_steps)
        return (self.config.total_steps - self.progress.env_steps) // self._round_envs

    @property
    def done(self) -> bool:
        return bool(self.agreed_stop) or self._steps_left <= 0

    def close_with(self, resource: Any) -> None:
        """Close ``resource`` after everything else, when the trainer is closed."""
        self._closing.append(resource)

    def close(self) -> None:
        """Close everything that the trainer was given; may be called twice."""
        while self._closing:
            self._closing.pop(0).close()

    def report(self) -> None:
        if not self._in_agreement:  # a round without collection
            self._sync_ranks(0)
        self._in_agreement = False
        self.learner.check_finite(wait=False)
        self.reports.report(self)

    def collect(self, mode: Mode = "explore", shards: int | None = None) -> None:
        if self.loop.one_pass and self.progress.env_steps >= (whole := self.collector.spec.steps or sys.maxsize):
            raise RunError(f"the recording is used up: the loop reads it once, and has read all of its {whole} steps")
        self.policy.normalizer.commit()
        self.ctx.schedules.refresh(self.steps)  # an exploration's, too
        shards = shards and min(shards, len(self.collector.spec.shards))
        with self.clock.phase("collect"):
            self._order(mode, shards)
            segments = self.collector.poll(shards)
            steps = [self._receive(segment) for segment in segments]
            self.progress.env_steps += self._sync_ranks(sum(steps))
        if self.collector.spec.steps is not None:
            self.policy.normalizer.commit()  # nobody acts by what a recording shows
        for segment in segments:
            self.hooks.hook.rlplug_collected(run=self, segment=segment)

    def play(
        self, jobs: Sequence[Job], weights: Mapping[str, Weights] | None = None, *, mine: bool = False
    ) -> Iterator[tuple[Job, Batch]]:
        if n := sum(n or 0 for n in self.collector.in_flight):
            raise RunError(f"{n} rollouts are in flight; a loop that plays jobs has none then: in_flight=1, all shards")
        self.policy.normalizer.commit()
        ranks, shared = self.learner.collectives, self.learner.replicated or not mine
        part, parts = (0, 1) if self.learner.replicated else (ranks.rank, ranks.world_size)
        cuts = [len(jobs) * i // parts for i in range(parts + 1)]
        if not shared and len(jobs) < parts:
            raise RunError(f"{len(jobs)} jobs for {parts} ranks, and mine=True: each has to keep one; play more jobs")
        own = slice(cuts[part], cuts[part + 1])
        with self.clock.phase("collect"):
            batches = (batch for _, batch in self.collector.play(jobs[own], weights or {}))
            given = [next(batches, dict[str, Any]()) for _ in range(-(-len(jobs) // parts))]
            every = ranks.exchange(given) if parts > 1 else [given]
            played = [batch for i, share in enumerate(every) for batch in share[: cuts[i + 1] - cuts[i]]]
        for i, batch in enumerate(played):
            segment = Segment({key: leaf for key, leaf in batch.items() if key not in OF_EPISODE}, whole=True)
            self.learner.observe(segment)
            self.progress.env_steps += int(batch["length"].sum())
            if own.start <= i < own.stop:  # the others' are gathered when they are logged
                self.episodes.add_whole(batch)
                self.hooks.hook.rlplug_collected(run=self, segment=segment)
        self.learner.hold(shared)
        self._sync_ranks(0)
        return zip(jobs, played, strict=True) if shared else zip(jobs[own], played[own], strict=True)

    def _order(self, mode: Mode, shards: int | None) -> None:
        """Order rollouts: a round, and what the loop wants ahead of it. All ordered steps fit into ``total_steps``.

        So many shards make a round, and what is ordered always comes out as whole rounds: ranks never wait for each
        other in vain.
        """
        total, length = len(self.collector.spec.shards), self.ctx.rollout_length
        per_shard = len(self.ctx.env_ids) // total
        count = total if shards is None else shards
        self._round_envs = self.config.num_envs * count // total
        self._is_async = self.loop.in_flight > 1 or self.loop.broadcast_interval > 1 or count < total
        most = self._steps_left // length * count
        if not most:
            most, length = count, self._steps_left
        for ahead in range(1, 1 + (self.loop.in_flight if mode == "explore" else 1)):
            in_flight = {shard: n for shard, n in enumerate(self.collector.in_flight) if n is not None}
            idle = [shard for shard, n in in_flight.items() if n < ahead][: max(0, most - sum(in_flight.values()))]
            if idle:
                version = self._version(length * per_shard * len(idle) / total)
                self.collector.submit(Rollout(length, mode, version, self._version_steps), idle)

    def _version(self, steps: float) -> int:
        """Return the version of the weights for the next rollouts: the newest, or the last one while it may serve.

        Args:
            steps: that these are for an actor, on average.
        """
        limit = self.loop.max_weight_sync_delay or math.inf
        due = self._rounds >= self.loop.broadcast_interval or self._shard_steps >= limit
        if due and self.progress.version != self.progress.updates:
            self.progress.version, self._rounds, self._shard_steps = self.progress.updates, 0, 0
            self._version_steps = self.progress.env_steps
        self._rounds, self._shard_steps = self._rounds + 1, self._shard_steps + steps
        return self.progress.version

    def _receive(self, segment: Segment) -> int:
        """Take a segment in, and return its environment steps."""
        spec, steps = self.collector.spec, self.progress.env_steps
        check_segment(segment.batch, steps, env_ids := self.ctx.env_ids[segment.columns])
        if not self.ctx.beyond:
            self.ctx.beyond += beyond(segment.batch, steps, env_ids, spec.bounds)
        self.learner.observe(segment)
        fresh = not self._is_async or self._is_fresh(segment)
        whole = len(segment.batch["valid"]) > self.ctx.rollout_length
        if fresh and (whole or self.ctx.needs.data not in ("rollout", "segments")):
            # the few rows of a last, short rollout would make a poor gradient
            if self.ctx.needs.data != "rollout":
                segment.batch = on_cpu(segment.batch)  # buffers keep their books on the host
            for part in parts(segment.batch) if "gradients" in segment.batch else ():
                self.buffer.add(replace(segment, batch=part))
            if "gradients" not in segment.batch:
                self.buffer.add(segment)
        return self.episodes.add(segment.batch, segment.columns)

    def _is_fresh(self, segment: Segment) -> bool:
        """Measure how old a segment's weights are, in updates and in environment steps; is it within the limit?"""
        updates, limit = self.progress.updates - segment.version, self.loop.max_staleness
        ages = {"staleness": updates, "staleness_steps": self.progress.env_steps - segment.version_steps}
        if limit is not None:
            ages["too_stale"] = int(updates > limit)
        self.means.add({name: torch.tensor(float(age)) for name, age in ages.items()})
        return limit is None or updates <= limit

    def _sync_ranks(self, steps: int) -> int:
        """Return the environment steps of all ranks; agree on whether to stop and whether to checkpoint."""
        ranks, first = self.learner.collectives, self.learner.collectives.rank == 0
        own = [steps if first or not self.learner.replicated else 0, first and self.reports.ready_to_save()]
        own += [len(self.ctx.beyond), *(self.stop_signal == number for number in SIGNALS)]
        steps, may, found, *stops = ranks.sums(own)
        if found and not self._told_beyond:
            self._told_beyond = True
            self.ctx.beyond[:] = every = [said for rank in ranks.exchange(self.ctx.beyond) for said in rank]
            if first:
                print(f"rlplug: {every[0]}; {GOES_ON}", file=sys.stderr, flush=True)
        self.may_checkpoint, self._in_agreement = bool(may), True
        if ranks.world_size > 1:
            self.agreed_stop = next((number for number, asked in zip(SIGNALS, stops, strict=True) if asked), 0)
        return steps

    def ready(self) -> bool:
        ready, ranks = self.buffer.ready(), self.learner.collectives
        # an episode ends on one rank, and not yet on another; a segment is too old for one of them
        if self.ctx.needs.data == "episodes" or self.loop.max_staleness is not None:
            return ranks.sums([ready])[0] == ranks.world_size
        return ready

    def update(self, batch: Batch | None = None) -> Losses:
        skipped = self.learner.skipped
        with self.clock.phase("update"):
            self.ctx.schedules.refresh(self.steps)
            if self.learner.compiler:
                self.learner.compiler.decide(self.steps, self.config.total_steps)
            losses = self.learner.update(batch)
        self.means.add(losses.terms | losses.metrics, finite=self.learner.skipped > skipped)
        self.hooks.hook.rlplug_updated(run=self, losses=losses)
        return losses

    def state(self) -> Tree:
        """Return what all ranks share beside the weights: optimizers, counters, and means that were not logged yet."""
        return {"learner": self.learner.state(), "progress": vars(self.progress), "means": self.means.state()} | {
            "version_age": (self._rounds, self._shard_steps, self._version_steps)
        }

    def load(self, state: Tree) -> None:
        self.learner.load(state["learner"])
        vars(self.progress).update(state["progress"])
        self._rounds, self._shard_steps, self._version_steps = state["version_age"]
        self.means.load({name: values.to(self.ctx.device) for name, values in state["means"].items()})

    def stream_state(self) -> Tree:
        """Return where this rank's environments and their episodes stand."""
        return {"collector": self.collector.state(), "episodes": self.episodes.state()}

    def load_stream(self, state: Mapping[str, Any]) -> None:
        self.collector.load(state["collector"])
        self.episodes.load(state["episodes"])
        if state["collector"]["env"] is None:  # new episodes begin
            self.episodes.forget()

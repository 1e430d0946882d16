"""The trainer: collection, updates, and reports between rounds, driven by a loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pluggy
import torch

from rlplug.api import Collector, Job, Losses, Run, Segment
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.nonfinite import check_bounds, check_segment
from rlplug.collection.play import of_keys
from rlplug.context import ResolvedRun
from rlplug.contract.jobs import check_jobs
from rlplug.host import on_cpu
from rlplug.registry import Events
from rlplug.trainer.agreement import Agreement
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.metrics import Clock, Means
from rlplug.trainer.orders import Orders
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.types import Batch, Mode, NamedWeights, RunError, Tree


class Trainer(Run):
    """Implementation of ``api.Run`` from components that ``run.build`` creates."""

    def __init__(
        self,
        *,
        resolved: ResolvedRun,
        run_dir: Path,
        policy: BehaviorPolicy,
        collector: Collector,
        learner: RankLearner,
        reports: Any,  # ``run.callbacks.Callbacks``
    ) -> None:
        self.resolved, self.config, self.loop = resolved, resolved.config, resolved.loop
        self.run_dir, self.policy, self.ctx, self.algorithm = run_dir, policy, (ctx := policy.ctx), policy.algorithm
        self.learner: RankLearner = learner
        self.buffer, self.progress, self.collector, self.reports = learner.buffer, learner.progress, collector, reports
        self.clock, self.means, self.episodes = Clock(), Means(), EpisodeStats(len(ctx.env_ids), ctx.spec.nested)
        self.orders = Orders(self.loop, self.ctx, self.progress)
        self.agreement = Agreement(learner.placement, reports.ready_to_save, self.ctx.beyond)
        self._closing: list[Any] = [reports, collector]
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)

    @property
    def logged(self) -> int:
        return self.reports.log.rows

    @property
    def evaluated(self) -> tuple[int, int]:
        return self.reports.evaluation.evaluator.player.ended

    @property
    def steps(self) -> int:
        return getattr(self.progress, self.loop.unit)

    @property
    def done(self) -> bool:
        return bool(self.agreement.stop) or self.orders.steps_left <= 0

    def close_with(self, resource: Any) -> None:
        """Close ``resource`` after everything else, when the trainer is closed."""
        self._closing.append(resource)

    def close(self) -> None:
        """Close all resources of the trainer; may be called twice."""
        while self._closing:
            self._closing.pop(0).close()

    def report(self) -> None:
        self.agreement.conclude()
        self.learner.check_finite(wait=False)
        self.reports.report(self)
        self.policy.normalizer.commit()

    def collect(self, mode: Mode = "explore") -> None:
        if self.loop.one_pass and self.progress.env_steps >= (recorded := self.collector.spec.steps or sys.maxsize):
            raise RunError(f"the dataset is used up: the loop reads it once and has read all of its {recorded} steps")
        self.ctx.schedules.refresh(self.steps)  # also of exploration modules
        with self.clock.phase("collect"):
            tasks = self.policy.curriculum and self.policy.curriculum.tasks()
            segments = self.collector.poll(self.orders.submit(self.collector, mode, tasks))
            self.progress.env_steps += (n := self.agreement.reach(sum(map(self._receive, segments))))
            self._refill(n)
        if self.collector.spec.steps is not None:
            self.policy.normalizer.commit()  # acting does not depend on datasets
        for segment in segments:
            self.hooks.hook.rlplug_collected(run=self, segment=segment)

    def play(
        self, jobs: Sequence[Job], weights: NamedWeights | None = None, *, mine: bool = False, store: bool = False
    ) -> Iterator[tuple[Job, Batch]]:
        if n := sum(n or 0 for n in self.collector.in_flight):
            raise RunError(f"{n} rollouts are in flight; a loop that runs jobs must have none: in_flight=1, all shards")
        placement, data = self.learner.placement, self.ctx.needs.data
        check_jobs(jobs, placement.parts if mine else 0)
        if store and data not in ("windows", "episodes"):
            raise RunError(f"store=True: needs a buffer of windows or episodes, but the algorithm learns from {data}")
        self.learner.hold(placement.parts == 1 or not mine)
        own = range(len(jobs))[placement.share(len(jobs))]
        whole = store or self.learner.observers or self.hooks.hook.rlplug_played.get_hookimpls()
        asked = [replace(jobs[i], keys=None) if whole else jobs[i] for i in own]
        played = ((own[n], batch) for n, batch in self.collector.play(asked, weights or {}))
        ended, before = dict[int, Batch](), self.progress.env_steps
        with self.clock.phase("collect"):
            if placement.parts > 1:
                pairs = [pair for rank in placement.exchange([*played]) for pair in rank]
                played = iter(sorted(pairs, key=itemgetter(0)))
            i, ended[i] = next(played, (-1, {}))
        while i >= 0:
            if not mine or i in own:
                yield jobs[i], of_keys(ended[i], jobs[i].keys, self.ctx.spec.nested)
            with self.clock.phase("collect"):
                i, ended[i] = next(played, (-1, {}))
        for i, job in enumerate(jobs):
            rows = {key: leaf for key, leaf in ended[i].items() if key not in OF_EPISODE}
            self.learner.observe(segment := Segment(rows, whole=True))
            self.progress.env_steps += int(ended[i]["length"].sum())
            if i in own:  # those of other ranks are gathered for logging
                self.episodes.add_whole(ended[i])
                self.reports.user.add_job(ended[i])
                self.hooks.hook.rlplug_played(run=self, job=job, batch=ended[i])
                if store:
                    self.buffer.add(segment)
        self._refill(self.progress.env_steps - before)
        self.agreement.reach()

    def _receive(self, segment: Segment) -> int:
        """Observe, count and store a segment, and return its environment steps."""
        spec, steps = self.collector.spec, self.progress.env_steps
        check_segment(segment.batch, steps, env_ids := self.ctx.env_ids[segment.columns])
        check_bounds(segment.batch, steps, env_ids, spec.bounds, self.ctx.beyond)
        self.learner.observe(segment)
        ages = self.orders.ages(segment)
        self.means.add({name: torch.tensor(float(age)) for name, age in ages.items()})
        whole = len(segment.batch["valid"]) > self.ctx.rollout_length
        if not ages.get("too_stale") and (whole or self.ctx.needs.data not in ("rollout", "segments")):
            # the few rows of a short last rollout would make a poor gradient
            if self.ctx.needs.data != "rollout":
                segment.batch = on_cpu(segment.batch)  # buffers keep their indices on the host
            self.buffer.add(segment)
        return self.episodes.add(segment.batch, segment.columns)

    def begin_empty(self) -> int:
        """Collect rows for an empty buffer before learning continues; return the environment steps that this takes."""
        warm_up = self.buffer.warm_up * self.config.num_envs // len(self.ctx.env_ids)
        self.progress.refill = max(self.ctx.learning_starts, warm_up, 1)
        return self.progress.refill

    def _refill(self, steps: int) -> None:
        """Count collected steps if the buffer began empty, until it can be sampled."""
        if (progress := self.progress).refill:
            progress.refilled += steps
            progress.refill = max(progress.refill - steps, 1 - self._filled())

    def ready(self) -> bool:
        return not self.progress.refill and self._filled()

    def _filled(self) -> bool:
        ready, ranks = self.buffer.ready(), self.learner.placement.ranks
        # ranks may differ: an episode may end, or a segment be too old, on only one of them
        if self.ctx.needs.data == "episodes" or self.loop.tempo.max_staleness is not None:
            return ranks.sums([ready])[0] == ranks.world_size
        return ready

    def update(self, batch: Batch | None = None) -> Losses:
        skipped = self.learner.steps.skipped
        with self.clock.phase("update"):
            self.ctx.schedules.refresh(self.steps)
            self.learner.steps.compiler.decide(self.steps, self.config.total_steps)
            losses = self.learner.update(batch)
        self.means.add(losses.terms | losses.metrics, finite=self.learner.steps.skipped > skipped)
        self.hooks.hook.rlplug_updated(run=self, losses=losses)
        return losses

    def state(self) -> Tree:
        """Return the shared state of all ranks except weights: optimizers, counters, means not logged yet."""
        parts = {"learner": self.learner, "orders": self.orders, "means": self.means}
        return {name: part.state() for name, part in parts.items()} | {"progress": vars(self.progress)}

    def load(self, state: Tree) -> None:
        self.learner.load(state["learner"])
        vars(self.progress).update(state["progress"])
        self.orders.load(state["orders"])
        self.means.load({name: values.to(self.ctx.device) for name, values in state["means"].items()})

    def stream_state(self) -> Tree:
        """Return the state of this rank's environments and their episodes."""
        return {"collector": self.collector.state(), "episodes": self.episodes.state()}

    def load_stream(self, state: Mapping[str, Any]) -> None:
        self.collector.load(state["collector"])
        self.episodes.load(state["episodes"])
        if state["collector"]["env"] is None:  # new episodes begin
            self.episodes.forget()

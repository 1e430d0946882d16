"""What a loop drives: collection, updates, and reports between rounds."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pluggy

from rlplug.api import Collector, Losses, Run
from rlplug.collection.episodes import Episodes
from rlplug.collection.nonfinite import blame_nonfinite, check_segment
from rlplug.context import ResolvedRun
from rlplug.registry import Events
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.metrics import Clock, Means
from rlplug.trainer.policy import Policy
from rlplug.types import Batch, Mode, Tree

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        learner: FabricLearner,
        reports: Reports,
    ) -> None:
        self.resolved, self.config, self.loop = resolved, resolved.config, resolved.loop
        self.run_dir, self.policy, self.ctx, self.algorithm = run_dir, policy, policy.ctx, policy.algorithm
        self.learner: FabricLearner = learner
        self.buffer, self.progress, self.collector, self.reports = learner.buffer, learner.progress, collector, reports
        self.clock, self.means, self.episodes = Clock(), Means(), Episodes(len(self.ctx.env_ids))
        self._closing: list[Any] = [reports, collector]
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)
        self.stop_signal = 0  # the signal that asked this process to stop; 0: none did
        self.agreed_stop = 0  # the signal that ends the run, once all ranks know
        self.may_checkpoint = False  # whether the first rank can write a checkpoint after this round

    @property
    def logged(self) -> int:
        return self.reports.logged

    def request_stop(self, signal_number: int) -> None:
        """End the run after this round; 0 takes that back."""
        self.stop_signal = signal_number
        if self.learner.collectives.world_size == 1:
            self.agreed_stop = signal_number

    def agree_to_stop(self, signal_number: int) -> None:
        """End the run, as all ranks know that one of them was asked to."""
        self.agreed_stop = signal_number

    @property
    def _steps_left(self) -> int:
        """Steps of every environment until ``total_steps``, which is never exceeded."""
        return (self.config.total_steps - self.progress.env_steps) // self.config.num_envs

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
        self.learner.check_finite()
        self.reports.report(self)

    def collect(self, mode: Mode = "explore") -> None:
        self.policy.normalizer.commit()
        length = min(self.loop.rollout_length, self._steps_left)
        whole = length == self.loop.rollout_length
        further = (self._steps_left - length) // length if whole else 0
        blame = blame_nonfinite(self.collector, length, self.progress.env_steps, self.ctx.env_ids)
        with self.clock.phase("collect"), blame:
            for segment in self.collector.collect(length, mode=mode, further=further):
                check_segment(segment, self.progress.env_steps, self.ctx.env_ids, self.collector.bounds)
                self.learner.observe(segment)
                if whole or self.buffer.off_policy:  # a last rollout of few rows would make a poor gradient
                    self.buffer.add(segment)
                self.progress.env_steps += self._sync_ranks(self.episodes.add(segment))
                self.hooks.hook.rlplug_collected(run=self, segment=segment)

    def _sync_ranks(self, steps: int) -> int:
        """Return the environment steps of all ranks; agree on whether to stop and whether to checkpoint."""
        ranks, first = self.learner.collectives, self.learner.collectives.rank == 0
        own = [steps if first or not self.learner.replicated else 0, first and self.reports.ready_to_save()]
        steps, may, *stops = ranks.sums([*own, *(self.stop_signal == number for number in SIGNALS)])
        self.may_checkpoint = bool(may)
        if ranks.world_size > 1:
            self.agreed_stop = next((number for number, asked in zip(SIGNALS, stops, strict=True) if asked), 0)
        return steps

    def ready(self) -> bool:
        return self.buffer.ready()

    def update(self, batch: Batch | None = None) -> Losses:
        skipped = self.learner.skipped
        with self.clock.phase("update"):
            self.ctx.schedules.refresh(self.progress.env_steps)
            losses = self.learner.update(batch)
        self.means.add(losses.terms | losses.metrics, finite=self.learner.skipped > skipped)
        self.hooks.hook.rlplug_updated(run=self, losses=losses)
        return losses

    def state(self) -> Tree:
        """Return what all ranks share beside the weights: optimizers, counters, and means that were not logged yet."""
        return {"learner": self.learner.state(), "progress": vars(self.progress), "means": self.means.state()}

    def load(self, state: Tree) -> None:
        self.learner.load(state["learner"])
        vars(self.progress).update(state["progress"])
        self.means.load({name: values.to(self.ctx.device) for name, values in state["means"].items()})

    def stream_state(self) -> Tree:
        """Return where this rank's environments and their episodes stand."""
        return {"collector": self.collector.state(), "episodes": self.episodes.state()}

    def load_stream(self, state: Mapping[str, Any]) -> None:
        self.collector.load(state["collector"])
        self.episodes.load(state["episodes"])
        if state["collector"]["env"] is None:  # new episodes begin
            self.episodes.forget()

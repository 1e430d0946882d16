"""One run: everything built from its configuration, driven by its loop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pluggy
import torch
from lightning.fabric import Fabric

from rlplug.api import Buffer, Collector, Loop, Losses, Plan, Run
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.collection.broadcast import BroadcastCollector
from rlplug.collection.episodes import Episodes
from rlplug.collection.nonfinite import blame_nonfinite, check_segment
from rlplug.config import RunConfig
from rlplug.evaluation.evaluator import Evaluator, Stopped
from rlplug.evaluation.video import ALONE, picture, record
from rlplug.registry import Events
from rlplug.run.state import capture
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.metrics import Clock, Means
from rlplug.trainer.policy import Policy, context
from rlplug.types import Batch, EnvSpec, Mode, Progress, Tree

if TYPE_CHECKING:
    from rlplug.actors.cluster import Cluster
    from rlplug.actors.evaluation import Evaluations

STOPS = (signal.SIGTERM, signal.SIGINT)


class Trainer(Run):
    """See ``api.Run``. Building one makes environments and networks, and writes nothing."""

    def __init__(self, config: RunConfig, folder: Path, plan: Plan, fabric: Fabric, spec: EnvSpec, loop: Loop) -> None:
        self.config, self.folder, self.plan, self.fabric, self.loop = config, folder, plan, fabric, loop
        self.clock = Clock()
        self.progress = Progress()
        self.startup_s = 0.0
        self.asked = 0  # or the signal by which this process was asked to stop
        self._heard = 0  # or the one by which any rank was, as of the last round
        self._idle = False  # may a checkpoint be written after this round?
        self.identity = uuid4().hex
        self.store = FileRowLog()
        self.keeper: CheckpointManager | None = None
        self.cluster: Cluster | None = None
        self.evaluations: Evaluations | None = None
        self.beside = plan.actors is not None and plan.actors.evaluation > 0
        """are evaluations played while training goes on?"""
        rank, world = fabric.global_rank, plan.world_size
        self.replicated = config.num_envs % world != 0
        share = config.num_envs // world
        env_ids = range(config.num_envs) if self.replicated else range(rank * share, (rank + 1) * share)
        self.ctx = context(config, spec, loop, fabric.device, env_ids, rank, world)
        self.policy = Policy(config, self.ctx)
        self.algorithm, self.exploration = self.policy.algorithm, self.policy.exploration
        self.normalizer = self.policy.normalizer
        self.buffer: Buffer = config.buffer.build(self.ctx)
        self.learner: FabricLearner = FabricLearner(
            fabric,
            self.ctx,
            self.algorithm,
            self.buffer,
            self.exploration,
            self.progress,
            plan.microbatches,
            config.compile,
            config.on_nan,
            self.normalizer,
            self.replicated,
            scaled=plan.precision == "16-mixed",
        )
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)
        self.collector: Collector = self._collector()
        self.evaluator = Evaluator(
            self.policy.env, self.algorithm, self.ctx, config.eval.episodes, normalize=self.policy.normalize
        )
        self.episodes = Episodes(len(self.ctx.env_ids))
        self.means = Means()
        self.evaluation: dict[str, float] = {}
        self.evaluated_at: int | None = None
        self.logged = 0
        self._logged_at = self._evaluated_at = 0
        self._logged_wall, self._logged_steps, self._logged_updates = self.clock.wall(), 0, 0

    def _collector(self) -> Collector:
        """Of this rank's environments; where they do not divide by the ranks, the first one's for all."""
        first = self.fabric.is_global_zero
        if self.replicated and not first:
            return BroadcastCollector(None, self.learner.broadcast)
        own: Collector
        if self.plan.actors is None:
            own = self.policy.collector(self.ctx.env_ids)
        else:
            from rlplug.actors.collector import Actors

            count = self.plan.actors.count // (1 if self.replicated else self.plan.world_size)
            own = Actors(self.policy, self.plan, self.progress, self.ctx.env_ids, count, self.ctx.rank * count)
        return BroadcastCollector(own, self.learner.broadcast) if self.replicated else own

    def start(self) -> None:
        """Be ready to collect, with the actors that there are.

        Raises:
            ConfigError: they cannot be had.
        """
        if self.plan.actors is not None:
            from rlplug.actors import join

            first = self.fabric.is_global_zero
            self.cluster = join(self.plan, first, first or not self.replicated, self.learner.broadcast)
            if first and self.plan.actors.evaluation:
                from rlplug.actors.evaluation import Evaluations

                self.evaluations = Evaluations(self.policy, self.plan)
        self.collector.start()

    def check_pictures(self) -> None:
        """Make an environment that shows itself, and look at it.

        Raises:
            ConfigError: it does not.
        """
        with closing(self.policy.env(ALONE, render=True)) as env:
            env.reset([0])
            picture(env)

    def record(self, episodes: int, path: Path) -> None:
        """Play greedy episodes for a video.

        Raises:
            ConfigError: the environment shows no pictures.
        """
        record(
            partial(self.policy.env, ALONE, render=True),
            path,
            algorithm=self.algorithm,
            ctx=self.ctx,
            seed=self.config.seed,
            episodes=episodes,
            normalize=self.normalizer,
        )

    # ---- what a loop drives ---------------------------------------------------------------------------------------

    @property
    def round_steps(self) -> int:
        """Environment steps of one round of collection, final observations not counted off."""
        return self.loop.rollout_length * self.config.num_envs

    @property
    def _rows_left(self) -> int:
        """Rows of every environment until ``total_steps``, which is never exceeded."""
        return (self.config.total_steps - self.progress.env_steps) // self.config.num_envs

    @property
    def stopping(self) -> int:
        """The signal that ends the run; with several ranks, once all of them know."""
        return self.asked if self.plan.world_size == 1 else self._heard

    @property
    def done(self) -> bool:
        return bool(self.stopping) or self._rows_left <= 0

    def collect(self, mode: Mode = "explore") -> None:
        self.learner.check_finite()
        self._report()
        self.normalizer.commit()
        rows = min(self.loop.rollout_length, self._rows_left)
        whole = rows == self.loop.rollout_length
        further = (self._rows_left - rows) // rows if whole else 0
        with (
            self.clock.phase("collect"),
            blame_nonfinite(self.collector, rows, self.progress.env_steps, self.ctx.env_ids),
        ):
            for segment in self.collector.collect(rows, mode=mode, further=further):
                self._receive(segment, whole)

    def _receive(self, segment: Batch, whole: bool) -> None:
        check_segment(segment, self.progress.env_steps, self.ctx.env_ids, self.collector.bounds)
        with self.learner.observing():
            self.normalizer.observe(segment, self.learner)
            self.algorithm.observe(segment, self.learner)
            seen = self.normalizer.normalized(segment)
            for extra in self.exploration.values():
                extra.observe(seen, self.learner)
        if whole or self.buffer.off_policy:  # the few rows of a last, short rollout would make a poor gradient
            self.buffer.add(segment)
        self.progress.env_steps += self._agree(self.episodes.add(segment))
        self.hooks.hook.rlplug_collected(run=self, segment=segment)

    def _agree(self, steps: int) -> int:
        """The steps of all ranks, which hear from one another whether to stop, and from the first whether it is time
        for a checkpoint."""
        self._idle = self.keeper is not None and self.keeper.idle
        if self.plan.world_size == 1:
            return steps
        first = self.fabric.is_global_zero
        said = [steps if first or not self.replicated else 0, self._idle and first]
        said += [self.asked == number for number in STOPS]
        steps, idle, *stops = self.learner.total(said)
        self._idle = bool(idle)
        self._heard = next((number for number, ranks in zip(STOPS, stops, strict=True) if ranks), 0)
        return steps

    def ready(self) -> bool:
        return self.buffer.ready()

    def update(self, batch: Batch | None = None) -> Losses:
        with self.clock.phase("update"):
            self.ctx.schedules.refresh(self.progress.env_steps)
            skipped = self.learner.skipped
            losses = self.learner.step(batch)
            skipped = self.learner.skipped > skipped
        self.means.add(losses.terms, finite=skipped)
        self.means.add(losses.metrics, finite=skipped)
        self.hooks.hook.rlplug_updated(run=self, losses=losses)
        return losses

    # ---- reports --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Log, evaluate, write a checkpoint, if it is time to; between rounds, when every update has been made."""
        steps, config, score = self.progress.env_steps, self.config, None
        if steps >= self._logged_at + config.log.every:
            self._logged_at = steps - steps % config.log.every
            self.log()
        self._hear(wait=False)
        due = bool(config.eval.every) and steps >= self._evaluated_at + config.eval.every
        if due and not self.beside:
            score = self.evaluate()["eval/return_mean"]
            self._evaluated_at = steps - steps % config.eval.every
        elif due:
            self._hear(wait=True)
            if self.evaluations is not None and not self.evaluations.playing:
                self.evaluations.begin(steps)
        if self.keeper is not None:
            with self.clock.phase("checkpoint"):
                self._saved(self.keeper.poll())
                best = score is not None and self.learner.broadcast(self.keeper.is_best(score))
                # how good a policy is that is played beside is known later
                best = best or (due and self.beside and config.checkpoint.keep_best > 0)
                if best or (self._idle and self.keeper.due(steps)):
                    if not due:
                        self._hear(wait=True)
                    self._saved(self.keeper.submit(capture(self, score)))
        if due:  # a checkpoint in front of an evaluation that is played beside begins that again
            self._evaluated_at = steps - steps % config.eval.every

    def _hear(self, wait: bool) -> None:
        """Report the evaluation that actors play beside training, if it has ended."""
        beside = self.evaluations
        if beside is None or not beside.playing:
            return
        with self.clock.phase("evaluate"):
            played = beside.wait(stop=lambda: bool(self.asked)) if wait else beside.poll()
        if played is not None:
            self._evaluated(played, beside.at)
            if self.keeper is not None:
                self._saved(self.keeper.set_score(beside.at, played["eval/return_mean"]))

    def _saved(self, path: Path | None) -> None:
        if path is not None:
            self.hooks.hook.rlplug_checkpoint(run=self, path=str(path))

    def log(self) -> None:
        """One row of metrics, means since the last one."""
        finished = self.episodes.drain()
        if not self.replicated:
            rows = torch.tensor(finished, dtype=torch.float64, device=self.ctx.device).view(-1, 3)
            finished = self.learner.gather(rows).tolist()
        self.progress.episodes += len(finished)
        row: dict[str, float] = {}
        if finished:
            returns, lengths, _ = zip(*finished, strict=True)
            row |= {"episode/return": float(np.mean(returns)), "episode/length": float(np.mean(lengths))}
        row |= {f"train/{name}": value for name, value in self.means.drain().items()}
        if self.config.on_nan == "skip":
            row["train/skipped"] = self.learner.skipped
            self.learner.skipped = 0
        if self.learner.scale is not None:
            row["train/loss_scale"] = self.learner.scale.value.item()
        wall, steps, updates = self.clock.wall(), self.progress.env_steps, self.progress.updates
        seconds = max(wall - self._logged_wall, 1e-9)
        row["time/env_steps_per_s"] = (steps - self._logged_steps) / seconds
        row["time/updates_per_s"] = (updates - self._logged_updates) / seconds
        row["time/wall_s"] = wall
        row |= {f"time/{phase}": spent for phase, spent in self.clock.spent.items()}
        self._logged_wall, self._logged_steps, self._logged_updates = wall, steps, updates
        self._say(row)

    def _say(self, metrics: Mapping[str, float]) -> None:
        self.logged += 1
        self.hooks.hook.rlplug_logged(run=self, metrics=metrics, step=self.progress.env_steps)

    def evaluate(self) -> dict[str, float]:
        """Play the evaluation's episodes and report them.

        Raises:
            Stopped: the run was asked to stop meanwhile.
        """
        with self.clock.phase("evaluate"):
            first = self.fabric.is_global_zero
            played, self._heard = self.learner.broadcast(self._played() if first else (None, 0))
            if played is None:
                raise Stopped
        self._evaluated(played, self.progress.env_steps)
        return played

    def _evaluated(self, played: dict[str, float], env_steps: int) -> None:
        self.evaluation, self.evaluated_at = played, env_steps
        self.hooks.hook.rlplug_evaluated(run=self, metrics=played)
        self._say(played if env_steps == self.progress.env_steps else played | {"eval/env_steps": env_steps})

    def _played(self) -> tuple[dict[str, float] | None, int]:
        """The evaluation, or the signal that cut it short."""
        self._hear(wait=True)
        try:
            played = self._play()
        except Stopped:
            return None, self.asked
        if self.config.eval.record:
            path = self.folder / "videos" / f"step_{self.progress.env_steps:012d}.gif"
            self.record(self.config.eval.record, path)
        return played, self._heard

    def _play(self) -> dict[str, float]:
        steps = self.progress.env_steps
        if self.evaluations is None:
            return self.evaluator(steps, stop=lambda: bool(self.asked))
        if self.asked:
            raise Stopped
        self.evaluations.begin(steps)
        if (played := self.evaluations.wait(stop=lambda: bool(self.asked))) is None:
            raise Stopped
        return played

    def reports(self) -> Tree:
        """What was logged and evaluated, and what is still to be."""
        return {
            "logged": self.logged,
            "logged_at": self._logged_at,
            "logged_steps": self._logged_steps,
            "logged_updates": self._logged_updates,
            # one that is still being played is played again, when the run is continued
            "evaluated_at": 0 if self.evaluations and self.evaluations.playing else self._evaluated_at,
            "evaluation": self.evaluation,
            "evaluation_at": self.evaluated_at,
            "means": self.means.state(),
            "skipped": self.learner.skipped,
        }

    def load_reports(self, state: Tree) -> None:
        self.logged, self._logged_at = state["logged"], state["logged_at"]
        self._logged_steps, self._logged_updates = state["logged_steps"], state["logged_updates"]
        self._evaluated_at = state["evaluated_at"]
        self.evaluation, self.evaluated_at = state["evaluation"], state["evaluation_at"]
        self.means.load({name: values.to(self.ctx.device) for name, values in state["means"].items()})
        self.learner.skipped = state["skipped"]

    @property
    def since_logged(self) -> float:
        """Seconds since the last row of metrics."""
        return self.clock.wall() - self._logged_wall

    @since_logged.setter
    def since_logged(self, seconds: float) -> None:
        self._logged_wall = self.clock.wall() - seconds

    # ---- the whole run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, drive the loop to its end, evaluate; write a checkpoint of where that was.

        Raises:
            KeyboardInterrupt: the run was asked to stop twice.
            RunError: it cannot go on.
        """
        self.hooks.hook.rlplug_started(run=self)
        self.startup_s = self.clock.wall() - self.clock.before
        with suppress(Stopped):
            self.loop.run(self)
        self.learner.check_finite()
        self._hear(wait=True)
        # as it is now, so that a longer run goes on as if there had been no end
        snapshot = capture(self) if self.keeper is not None else None
        if not self.stopping:
            with suppress(Stopped):
                if self.progress.env_steps > self._logged_steps:
                    self.log()
                score = self.evaluate()["eval/return_mean"]
                if snapshot is not None:
                    snapshot.manifest["score"] = score
        if snapshot is not None and self.keeper is not None:
            self._saved(self.keeper.submit(snapshot))
            self._saved(self.keeper.wait())

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        self.collector.close()
        self.evaluator.close()
        if self.evaluations is not None:
            self.evaluations.close()
        if self.cluster is not None:
            self.cluster.close()

    def summary(self, status: str) -> Mapping[str, Any]:
        """What ``summary.json`` says."""
        last = self.keeper.last if self.keeper is not None else None
        wall = self.clock.wall()
        return {
            "status": status,
            **self.evaluation,
            "eval/env_steps": self.evaluated_at,
            "env_steps": self.progress.env_steps,
            "updates": self.progress.updates,
            "episodes": self.progress.episodes,
            "wall_s": round(wall, 3),
            "env_steps_per_s": round(self.progress.env_steps / (wall - self.startup_s), 1),
            "startup_s": round(self.startup_s, 3),
            "checkpoint": last and last.name,
        }

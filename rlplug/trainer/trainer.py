"""One run: everything built from its configuration, driven by its loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pluggy
import torch
from lightning.fabric import Fabric

from rlplug.api import Algorithm, Buffer, Exploration, Loop, Losses, Plan, Run, VecEnv
from rlplug.config import RunConfig
from rlplug.registry import Events
from rlplug.trainer.collector import collector
from rlplug.trainer.context import RunContext, Scope
from rlplug.trainer.evaluate import Evaluator
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.metrics import Clock, Episodes, Means
from rlplug.types import Batch, EnvSpec, Mode, Progress

TRAINING = 1  # tells training's environment seeds from evaluation's


class Trainer(Run):
    """See ``api.Run``. Building one makes environments and networks, and writes nothing."""

    def __init__(self, config: RunConfig, folder: Path, plan: Plan, fabric: Fabric, spec: EnvSpec, loop: Loop) -> None:
        self.config, self.folder, self.plan, self.fabric, self.loop = config, folder, plan, fabric, loop
        self.clock = Clock()
        self.progress = Progress()
        self.startup_s = 0.0
        self.stopping = False
        needs = config.algo.cls.needs(config.algo.cfg, spec)
        torch.manual_seed(config.seed)
        self.ctx = RunContext(
            spec=spec,
            needs=needs,
            slots=config.models,
            device=fabric.device,
            num_envs=config.num_envs,
            total_steps=config.total_steps,
            rows=self.loop.rows,
            batch_size=self.loop.batch_size,
            seed=config.seed,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            deterministic=config.deterministic,
        )
        self.algorithm: Algorithm = config.algo.build(self.ctx).to(fabric.device)
        self.exploration: dict[str, Exploration] = {
            name: chosen.build(self.ctx).to(fabric.device) for name, chosen in config.exploration.items()
        }
        self.buffer: Buffer = config.buffer.build(self.ctx)
        self.learner: FabricLearner = FabricLearner(
            fabric,
            self.ctx,
            self.algorithm,
            self.buffer,
            tuple(self.exploration.values()),
            self.progress,
            plan.microbatches,
            config.compile,
        )
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)
        seeds = np.random.SeedSequence([config.seed, TRAINING]).generate_state(config.num_envs)
        scope = Scope("actor", config.num_envs, self.ctx.env_ids)
        self.source = collector(
            self._make_env(scope),
            self.algorithm,
            self.ctx,
            scope,
            [int(seeds[i]) for i in scope.env_ids],
            self.exploration,
        )
        self.evaluator = Evaluator(self._make_env, self.algorithm, self.ctx, config.eval.episodes)
        self.episodes = Episodes(len(scope.env_ids))
        self.means = Means()
        self.evaluation: dict[str, float] = {}
        self.evaluated_at: int | None = None
        self._logged_at = self._evaluated_at = 0
        self._logged_wall, self._logged_steps, self._logged_updates = self.clock.wall(), 0, 0

    def _make_env(self, scope: Scope) -> VecEnv:
        return self.config.env.build(self.ctx.derive(scope=scope))

    # ---- what a loop drives ---------------------------------------------------------------------------------------

    @property
    def round_steps(self) -> int:
        """Environment steps of one round of collection, final observations not counted off."""
        return self.loop.rows * self.config.num_envs

    @property
    def _rows_left(self) -> int:
        """Rows of every environment until ``total_steps``, which is never exceeded."""
        return (self.config.total_steps - self.progress.env_steps) // self.config.num_envs

    @property
    def done(self) -> bool:
        return self.stopping or self._rows_left <= 0

    def collect(self, mode: Mode = "explore") -> None:
        self._report()
        rows = min(self.loop.rows, self._rows_left)
        with self.clock.phase("collect"):
            for segment in self.source.collect(rows, mode=mode):
                self._receive(segment, whole=rows == self.loop.rows)

    def _receive(self, segment: Batch, whole: bool) -> None:
        self.algorithm.observe(segment, self.learner)
        for extra in self.exploration.values():
            extra.observe(segment, self.learner)
        if whole or self.buffer.stale:  # the few rows of a last, short rollout would make a poor gradient
            self.buffer.add(segment)
        self.progress.env_steps += self.episodes.add(segment)
        self.hooks.hook.rlplug_collected(run=self, segment=segment)

    def ready(self) -> bool:
        return self.buffer.ready()

    def update(self, batch: Batch | None = None) -> Losses:
        with self.clock.phase("update"):
            self.ctx.schedules.refresh(self.progress.env_steps)
            losses = self.learner.step(batch)
        self.means.add(losses.terms)
        self.means.add(losses.metrics)
        self.hooks.hook.rlplug_updated(run=self, losses=losses)
        return losses

    # ---- reports --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Log and evaluate if it is time to; between rounds, when every update has been made."""
        steps, config = self.progress.env_steps, self.config
        if steps >= self._logged_at + config.log.every:
            self._logged_at = steps - steps % config.log.every
            self.log()
        if config.eval.every and steps >= self._evaluated_at + config.eval.every:
            self._evaluated_at = steps - steps % config.eval.every
            self.evaluate()

    def log(self) -> None:
        """One row of metrics, means since the last one."""
        finished = self.episodes.drain()
        self.progress.episodes += len(finished)
        row: dict[str, float] = {}
        if finished:
            returns, lengths, _ = zip(*finished, strict=True)
            row |= {"episode/return": float(np.mean(returns)), "episode/length": float(np.mean(lengths))}
        row |= {f"train/{name}": value for name, value in self.means.drain().items()}
        wall, steps, updates = self.clock.wall(), self.progress.env_steps, self.progress.updates
        seconds = max(wall - self._logged_wall, 1e-9)
        row["time/env_steps_per_s"] = (steps - self._logged_steps) / seconds
        row["time/updates_per_s"] = (updates - self._logged_updates) / seconds
        row["time/wall_s"] = wall
        row |= {f"time/{phase}": spent for phase, spent in self.clock.spent.items()}
        self._logged_wall, self._logged_steps, self._logged_updates = wall, steps, updates
        self.hooks.hook.rlplug_logged(run=self, metrics=row, step=steps)

    def evaluate(self) -> dict[str, float]:
        """Play the evaluation's episodes and report them."""
        with self.clock.phase("evaluate"):
            self.evaluation = self.evaluator(self.progress.env_steps, stop=lambda: self.stopping)
            self.evaluated_at = self.progress.env_steps
        self.hooks.hook.rlplug_evaluated(run=self, metrics=self.evaluation)
        self.hooks.hook.rlplug_logged(run=self, metrics=self.evaluation, step=self.progress.env_steps)
        return self.evaluation

    # ---- the whole run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, drive the loop to its end, evaluate.

        Raises:
            KeyboardInterrupt: the run was asked to stop during an evaluation, or twice.
        """
        self.hooks.hook.rlplug_started(run=self)
        self.startup_s = self.clock.wall()
        self.loop.run(self)
        if self.progress.env_steps > self._logged_steps:
            self.log()
        if not self.stopping:
            self.evaluate()

    def close(self) -> None:
        self.source.close()
        self.evaluator.close()

    def summary(self, status: str) -> Mapping[str, Any]:
        """What ``summary.json`` says."""
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
        }

"""Measurements between rounds: rows of metrics, evaluations and off-policy estimates."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Exploration, Job
from rlplug.buffer.episodes import side_by_side
from rlplug.buffer.samples import predictions
from rlplug.collection.play import Stopped
from rlplug.config.schema import Log
from rlplug.context import ResolvedRun
from rlplug.evaluation.evaluator import ALONE, Evaluator, own_evaluation, pictures, shares_of
from rlplug.functional.schedule import due
from rlplug.limits import Stopping
from rlplug.tracking import SystemUsage, write_video
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch, ConfigError, NamedWeights, Progress, Tree

if TYPE_CHECKING:
    from rlplug.actors.collector import AsyncEval


LEAST = "return_least_exploring"


def least_exploring(modules: Iterable[Exploration]) -> set[int]:
    """Return the third of the run's environments with the lowest noise levels; empty if levels are equal."""
    found = next((noise for extra in modules if (noise := extra.noise_by_env()) is not None), torch.empty(0))
    return {*found.argsort(stable=True)[: -(-len(found) // 3)].tolist()}


class MetricsLog:
    """Rows of metrics, one per ``cfg.every`` steps and one per evaluation."""

    def __init__(self, cfg: Log, stopping: Stopping) -> None:
        self.every, self.rows, self.stopping, self.usage = cfg.every, 0, stopping, SystemUsage() if cfg.system else None
        self.wall, self.last = 0.0, Progress()  # of the run at the last row of means
        self.window, self.recent = cfg.window, defaultdict[str, deque[float]](lambda: deque(maxlen=cfg.window))

    def steps(self, trainer: Trainer) -> int:
        """Return the run's steps at the last row of means."""
        return getattr(self.last, trainer.loop.unit)

    def due(self, trainer: Trainer) -> bool:
        return due(self.every, self.steps(trainer), trainer.steps)

    def log(self, trainer: Trainer) -> None:
        """Log one row of means since the last one."""
        row = self._episodes(trainer)
        trained = trainer.means.drain() | trainer.learner.steps.drain()
        row |= {f"train/{name}": x for name, x in trained.items()}
        own: Mapping[str, float] = trainer.buffer.metrics()
        ranks = trainer.learner.placement.exchange(own)
        row |= {f"buffer/{name}": sum(metrics[name] for metrics in ranks) for name in own}
        if (curriculum := trainer.policy.curriculum) is not None:
            row |= {f"curriculum/{name}": value for name, value in curriculum.metrics().items()}
            if trained and curriculum.metric.startswith(("train/", "buffer/", "curriculum/")):
                self.stopping.require(row, curriculum.metric)
        spent: Mapping[str, float] = trainer.collector.metrics()
        waiting = trainer.learner.placement.ranks.exchange(spent)
        row |= {f"time/{name}": float(np.mean([rank[name] for rank in waiting if rank])) for name in spent}
        wall = trainer.clock.wall()
        seconds = max(wall - self.wall, 1e-9)
        if trainer.progress.env_steps:
            row["time/env_steps_per_s"] = (trainer.progress.env_steps - self.last.env_steps) / seconds
        row["time/updates_per_s"] = (trainer.progress.updates - self.last.updates) / seconds
        row |= self.usage.read() if self.usage else {}
        row |= {"time/wall_s": wall} | {f"time/{phase}": spent for phase, spent in trainer.clock.spent.items()}
        self.wall, self.last = wall, replace(trainer.progress)
        self.log_row(trainer, row)

    def _episodes(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of each metric over the episodes since the last row, or over the last ``window`` with it."""
        ids, least = [*trainer.ctx.env_ids, -1], least_exploring(trainer.policy.exploration.values())  # -1: jobs
        names = ["return", "length", *(f"return/{name}" for name in trainer.episodes.groups)]
        ended = [
            dict(zip(names, (total, length, *by_group), strict=True)) | ({LEAST: total} if ids[env] in least else {})
            for total, length, env, *by_group in trainer.episodes.drain()
        ]
        reported = [*trainer.collector.episode_metrics(), *trainer.reports.user.drain()]
        ranks = trainer.learner.placement.exchange((ended, reported, trainer.episodes.agent_steps))
        for name, value in (item for *found, _ in ranks for episode in chain(*found) for item in episode.items()):
            self.recent[name].append(float(value))
        row = {f"episode/{name}": math.fsum(values) / len(values) for name, values in self.recent.items()}
        row |= {"agent_steps": steps} if (steps := sum(steps for *_, steps in ranks)) else {}
        trainer.progress.episodes += (n := sum(len(ended) for ended, *_ in ranks))
        if n and not any(reported for _, reported, _ in ranks):  # some of the metrics of others may come later
            self.stopping.require(row | {f"episode/{LEAST}": 0.0}, ("episode/", "agent_steps"))
        if self.window is None:
            self.recent.clear()
        return row

    def log_row(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        self.rows += 1
        self.stopping.read(row)
        if (curriculum := trainer.policy.curriculum) is not None and curriculum.metric in row:
            curriculum.read(row[curriculum.metric])
        trainer.hooks.hook.rlplug_logged(run=trainer, metrics=row, step=trainer.steps)

    def state(self) -> Tree:
        recent = {name: [*values] for name, values in self.recent.items()}
        return {"rows": self.rows, "steps": self.last.env_steps, "updates": self.last.updates, "recent": recent}

    def load(self, state: Tree, wall: float) -> None:
        self.rows, self.last, self.wall = state["rows"], Progress(state["steps"], state["updates"]), wall
        for name, values in state["recent"].items() if self.window else ():
            self.recent[name].extend(map(float, values))


class Schedule:
    """A measurement every ``every`` steps (0: only at the end), and its last result."""

    def __init__(self, every: int, possible: bool) -> None:
        self.every, self.possible = every, possible
        self.latest, self._last = dict[str, float](), 0

    def due(self, trainer: Trainer) -> bool:
        return self.possible and due(self.every, self._last, trainer.steps)

    def mark(self, trainer: Trainer) -> None:
        """Mark the due measurement as made or begun."""
        self._last = trainer.steps

    def state(self) -> Tree:
        return {"latest": self.latest, "last": self._last}

    def load(self, state: Tree) -> None:
        self.latest, self._last = tree.numbers(state["latest"]), state["last"]


class Evaluation(Schedule):
    """Evaluations: episodes are divided among ranks, or played by Ray actors during training (``is_async``).

    The episodes do not depend on the number of ranks; if environments are not independent, rank 0 plays all.
    """

    def __init__(self, policy: BehaviorPolicy, is_async: bool) -> None:
        super().__init__(policy.config.eval.every, policy.config.env.cls.traits.playable)
        self.policy, self.cfg, self.is_async = policy, policy.config.eval, is_async
        ctx, cfg, parts = policy.ctx, self.cfg, 1 if is_async else policy.ctx.world_size
        if parts > 1:
            with closing(policy.env(ALONE)) as env:
                parts = parts if env.traits.independent else 1
        self._parts = parts
        self.evaluator = Evaluator(policy.env, policy.algorithm, ctx, cfg, policy.normalize, self._share(cfg.episodes))
        own = {"hardware.actors.evaluation": is_async, "eval.steps": cfg.steps, "eval.timeout_s": cfg.timeout_s}
        if self.evaluator.own and (keys := [key for key, value in own.items() if value]):
            said = f"runs greedy episodes, but {cfg.function or policy.config.algo.name} evaluates in its own way"
            raise ConfigError(keys[0], f"{said}; use {'0' if is_async else 'null'}")
        self.actors: AsyncEval | None = None  # of rank 0, once started
        self.latest_at: int | None = None

    def start(self, resolved: ResolvedRun) -> None:
        from rlplug.actors.collector import AsyncEval

        self.actors = AsyncEval(self.policy, resolved)

    def run(self, trainer: Trainer) -> dict[str, float]:
        """Play the episodes, and record a video if requested; raise ``Stopped`` if a stop is requested."""
        policy, steps = self.policy, trainer.steps
        with trainer.clock.phase("evaluate"):
            metrics, _ = self.evaluator.evaluate(partial(self._play, trainer))
            if self.cfg.record and trainer.ctx.rank == 0:
                env, stop = policy.env(ALONE, render=True), lambda: bool(trainer.agreement.asked)
                shown = pictures(env, policy.algorithm, policy.ctx, self.cfg.record, policy.normalize, stop)
                video = trainer.run_dir / "videos" / f"step_{steps:012d}.mp4"
                with suppress(Stopped):
                    write_video(video, shown, env.traits.render_fps)
                made = predictions(policy.algorithm, trainer.buffer, policy.ctx, policy.normalizer.normalized)
                if made is not None:
                    write_video(video.with_stem(f"{video.stem}_predicted"), iter(made), env.traits.render_fps)
        return metrics

    def _play(self, trainer: Trainer, jobs: Sequence[Job], weights: NamedWeights | None) -> list[Batch]:
        """Play jobs of an evaluation, divided among the ranks."""
        own, shares = self._play_share(trainer, jobs, weights), list[list[Batch]]()
        for batches, asked in trainer.learner.placement.ranks.exchange((own, trainer.agreement.asked)):
            if batches is None:
                trainer.agreement.stop = asked
                raise Stopped
            shares.append(batches)
        return [side_by_side(parts) for parts in zip(*shares, strict=True)]

    def _play_share(self, trainer: Trainer, jobs: Sequence[Job], weights: NamedWeights | None) -> list[Batch] | None:
        """Play this rank's share of every job; return None if a stop is requested."""
        number, stop = trainer.steps, lambda: bool(trainer.agreement.asked)
        with suppress(Stopped):
            if self.actors is None:
                dealt = ((job, self._share(job.episodes, n)) for n, job in enumerate(jobs))
                return [self.evaluator.play(job, number, weights, stop, columns) for job, columns in dealt]
            if not stop():
                self.actors.begin(number)
                return None if (found := self.actors.wait(stop)) is None else [found]
        return None

    def _share(self, episodes: int, job: int = 0) -> range:
        """Return this rank's columns of a job: a share, or all if jobs of the algorithm's own evaluation are dealt."""
        rank, parts = self.policy.ctx.rank, self._parts
        if own_evaluation(self.policy.algorithm, self.cfg):
            return shares_of(episodes, 1)[0] if job % parts == rank else range(0)
        return shares_of(episodes, parts)[rank] if rank < parts else range(0)

    def state(self) -> Tree:
        """Return the last result; an unfinished evaluation restarts when the run is resumed."""
        playing = self.actors is not None and self.actors.playing
        return super().state() | {"latest_at": self.latest_at} | ({"last": 0} if playing else {})

    def load(self, state: Tree) -> None:
        super().load(state)
        self.latest_at = state["latest_at"]

    def close(self) -> None:
        self.evaluator.close()
        if self.actors is not None:
            self.actors.close()

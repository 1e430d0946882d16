"""What happens between two rounds: rows of metrics, evaluations and checkpoints, each where it is due."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.config.run import Checkpoint as CheckpointConfig
from rlplug.config.run import Eval
from rlplug.evaluation.evaluator import Evaluator, Played, Stopped, shares_of, summary
from rlplug.evaluation.video import ALONE, record
from rlplug.run.state import capture
from rlplug.trainer.policy import Policy
from rlplug.trainer.trainer import Trainer
from rlplug.types import Tree

if TYPE_CHECKING:
    from rlplug.actors.evaluation import AsyncEval


class MetricsLog:
    """Rows of metrics, one every ``every`` environment steps, and one for each evaluation."""

    def __init__(self, every: int) -> None:
        self.every, self.rows = every, 0
        self._due_after = 0
        self._wall, self._steps, self._updates = 0.0, 0, 0

    def due(self, trainer: Trainer) -> bool:
        return trainer.progress.env_steps >= self._due_after + self.every

    def log(self, trainer: Trainer) -> None:
        """Write one row: means since the last one."""
        progress, clock, ranks = trainer.progress, trainer.clock, trainer.learner.collectives
        steps, updates = progress.env_steps, progress.updates
        self._due_after = steps - steps % self.every
        finished = trainer.episodes.drain()
        if not trainer.learner.replicated:
            rows = torch.tensor(finished, dtype=torch.float64, device=trainer.ctx.device).view(-1, 3)
            finished = ranks.gather(rows).tolist()
        progress.episodes += len(finished)
        row: dict[str, float] = {}
        if finished:
            returns, lengths, _ = zip(*finished, strict=True)
            row |= {"episode/return": float(np.mean(returns)), "episode/length": float(np.mean(lengths))}
        row |= {f"train/{name}": value for name, value in (trainer.means.drain() | trainer.learner.drain()).items()}
        wall = clock.wall()
        seconds = max(wall - self._wall, 1e-9)
        row["time/env_steps_per_s"] = (steps - self._steps) / seconds
        row["time/updates_per_s"] = (updates - self._updates) / seconds
        row["time/wall_s"] = wall
        row |= {f"time/{phase}": spent for phase, spent in clock.spent.items()}
        self._wall, self._steps, self._updates = wall, steps, updates
        self.log_row(trainer, row)

    def log_rest(self, trainer: Trainer) -> None:
        """Write a last row, if there were steps since the one before."""
        if trainer.progress.env_steps > self._steps:
            self.log(trainer)

    def log_row(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        self.rows += 1
        trainer.hooks.hook.rlplug_logged(run=trainer, metrics=row, step=trainer.progress.env_steps)

    def since(self, wall: float) -> float:
        """Return the seconds since the last row."""
        return wall - self._wall

    def state(self) -> Tree:
        return {"rows": self.rows, "due_after": self._due_after, "steps": self._steps, "updates": self._updates}

    def load(self, state: Tree, wall: float) -> None:
        """Go on; the last row was written at ``wall`` seconds of the run."""
        self._wall = wall
        self.rows, self._due_after = state["rows"], state["due_after"]
        self._steps, self._updates = state["steps"], state["updates"]


class Evaluation:
    """Evaluations during and after training, whose episodes are shared out over the ranks.

    Args:
        is_async: Ray actors play them while training goes on.
    """

    def __init__(self, cfg: Eval, policy: Policy, run_dir: Path, is_async: bool) -> None:
        self.cfg, self.policy, self.run_dir = cfg, policy, run_dir
        ctx = policy.ctx
        columns = shares_of(cfg.episodes, ctx.world_size)[ctx.rank]
        self.evaluator = Evaluator(policy.env, policy.algorithm, ctx, cfg.episodes, policy.normalize, columns=columns)
        self.is_async = is_async
        self.actors: AsyncEval | None = None  # the first rank's, once they are started
        self.latest: dict[str, float] = {}
        self.latest_at: int | None = None
        self._due_after = 0

    def start(self, actors: AsyncEval) -> None:
        """Let ``actors`` play, which are there now."""
        self.actors = actors

    def due(self, trainer: Trainer) -> bool:
        return bool(self.cfg.every) and trainer.progress.env_steps >= self._due_after + self.cfg.every

    def mark(self, trainer: Trainer) -> None:
        """Count the evaluation that was due as made, or begun."""
        steps = trainer.progress.env_steps
        self._due_after = steps - steps % self.cfg.every

    def run(self, trainer: Trainer) -> dict[str, float]:
        """Play the evaluation's episodes.

        Raises:
            Stopped: a rank was asked to stop meanwhile.
        """
        with trainer.clock.phase("evaluate"):
            own = self._play(trainer)
            played: Played = []
            for episodes, stop_signal in trainer.learner.collectives.exchange((own, trainer.stop_signal)):
                if episodes is None:
                    trainer.agree_to_stop(stop_signal)
                    raise Stopped
                played += episodes
            if self.cfg.record and trainer.ctx.rank == 0:
                path = self.run_dir / "videos" / f"step_{trainer.progress.env_steps:012d}.gif"
                self.record(self.cfg.record, path)
        return summary(played)

    def _play(self, trainer: Trainer) -> Played | None:
        """Play this rank's share; None: it was asked to stop."""
        try:
            if not self.is_async:
                return self.evaluator.play(trainer.progress.env_steps, lambda: bool(trainer.stop_signal))
            if self.actors is None:  # the first rank's play
                return []
            if trainer.stop_signal:
                return None
            self.actors.begin(trainer.progress.env_steps)
            return self.actors.wait(lambda: bool(trainer.stop_signal))
        except Stopped:
            return None

    def record(self, episodes: int, path: Path) -> None:
        """Play greedy episodes for a video.

        Raises:
            ConfigError: the environment shows no pictures.
        """
        policy = self.policy
        make = partial(policy.env, ALONE, render=True)
        record(make, path, policy.algorithm, policy.ctx, policy.config.seed, episodes, policy.normalizer)

    def state(self) -> Tree:
        """Return the latest result; an evaluation that is still being played begins again when the run is resumed."""
        playing = self.actors is not None and self.actors.playing
        return {"latest": self.latest, "latest_at": self.latest_at, "due_after": 0 if playing else self._due_after}

    def load(self, state: Tree) -> None:
        self.latest, self.latest_at, self._due_after = state["latest"], state["latest_at"], state["due_after"]

    def close(self) -> None:
        self.evaluator.close()
        if self.actors is not None:
            self.actors.close()


class Callbacks:
    """What ``run.report()`` does: it logs, evaluates and writes checkpoints where they are due.

    Args:
        identity: of the run; a checkpoint belongs to it alone.
    """

    def __init__(
        self, run_dir: Path, cfg: CheckpointConfig, log: MetricsLog, evaluation: Evaluation, identity: str
    ) -> None:
        self.run_dir, self.cfg, self.log, self.evaluation, self.identity = run_dir, cfg, log, evaluation, identity
        self.row_log = FileRowLog()
        """where the buffer keeps its rows between two checkpoints"""
        self.manager: CheckpointManager | None = None

    @property
    def logged(self) -> int:
        return self.log.rows

    def open(self, trainer: Trainer) -> None:
        """From now on, write checkpoints."""
        self.manager = CheckpointManager(self.run_dir, self.cfg, trainer.progress.env_steps, trainer.ctx.rank == 0)

    def ready_to_save(self) -> bool:
        return self.manager is not None and self.manager.idle

    def report(self, trainer: Trainer) -> None:
        evaluation, score = self.evaluation, None
        if self.log.due(trainer):
            self.log.log(trainer)
        self._poll_eval(trainer)
        due = evaluation.due(trainer)
        if due and not evaluation.is_async:
            score = self.evaluate(trainer)["eval/return_mean"]
            evaluation.mark(trainer)
        elif due:
            self._poll_eval(trainer, wait=True)
            if evaluation.actors is not None:
                evaluation.actors.begin(trainer.progress.env_steps)
        self._save(trainer, score, due)
        if due:  # a checkpoint in front of an asynchronous evaluation begins that again
            evaluation.mark(trainer)

    def _save(self, trainer: Trainer, score: float | None, evaluating: bool) -> None:
        """Write a checkpoint, if one is due or the evaluation was among the best."""
        if self.manager is None:
            return
        with trainer.clock.phase("checkpoint"):
            self._saved(trainer, self.manager.poll())
            best = score is not None and trainer.learner.collectives.broadcast(self.manager.is_best(score))
            # the score of an asynchronous evaluation is known later
            best = best or (evaluating and self.evaluation.is_async and self.cfg.keep_best > 0)
            if best or (trainer.may_checkpoint and self.manager.due(trainer.progress.env_steps)):
                if not evaluating:
                    self._poll_eval(trainer, wait=True)
                self._saved(trainer, self.manager.submit(capture(trainer, score)))

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Evaluate now, and report the result.

        Raises:
            Stopped: the run was asked to stop meanwhile.
        """
        self._poll_eval(trainer, wait=True)
        result = self.evaluation.run(trainer)
        self._evaluated(trainer, result, trainer.progress.env_steps)
        return result

    def _evaluated(self, trainer: Trainer, result: dict[str, float], env_steps: int) -> None:
        self.evaluation.latest, self.evaluation.latest_at = result, env_steps
        trainer.hooks.hook.rlplug_evaluated(run=trainer, metrics=result)
        now = env_steps == trainer.progress.env_steps
        self.log.log_row(trainer, result if now else result | {"eval/env_steps": env_steps})

    def _poll_eval(self, trainer: Trainer, wait: bool = False) -> None:
        """Report the evaluation that actors play beside training, if it has ended."""
        actors = self.evaluation.actors
        if actors is None or not actors.playing:
            return
        with trainer.clock.phase("evaluate"):
            played = actors.wait(lambda: bool(trainer.stop_signal)) if wait else actors.poll()
        if played is not None:
            result = summary(played)
            self._evaluated(trainer, result, actors.env_steps)
            if self.manager is not None:
                self._saved(trainer, self.manager.set_score(actors.env_steps, result["eval/return_mean"]))

    def finish(self, trainer: Trainer) -> None:
        """After the loop: a last row, a last evaluation, and a checkpoint of where the loop ended."""
        trainer.learner.check_finite()
        self._poll_eval(trainer, wait=True)
        # as it is now, so that a longer run goes on as if there had been no end
        snapshot = capture(trainer) if self.manager is not None else None
        if not trainer.agreed_stop:
            try:
                self.log.log_rest(trainer)
                score = self.evaluate(trainer)["eval/return_mean"]
                if snapshot is not None:
                    snapshot.manifest["score"] = score
            except Stopped:
                pass
        if snapshot is not None and self.manager is not None:
            self._saved(trainer, self.manager.submit(snapshot))
            self._saved(trainer, self.manager.wait())

    def _saved(self, trainer: Trainer, path: Path | None) -> None:
        if path is not None:
            trainer.hooks.hook.rlplug_checkpoint(run=trainer, path=str(path))

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()
        self.evaluation.close()

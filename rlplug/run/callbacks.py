"""Actions between rounds: rows of metrics, evaluations, and checkpoints of a run's complete state."""

from __future__ import annotations

import warnings
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rlplug import tree
from rlplug.buffer.restored import like_collected
from rlplug.checkpointing.format import MISFITS, Checkpoint, FileRowLog, Snapshot
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.collection.play import Stopped
from rlplug.data.recorder import RunRecorder, episode_files
from rlplug.distributed.rng import global_state, load_global_state
from rlplug.envs.checking import checked
from rlplug.envs.spec_json import from_json, mismatch, to_json
from rlplug.estimation.estimation import Estimation
from rlplug.hooks import UserCallbacks
from rlplug.limits import Stopping
from rlplug.registry.discovery import unknown
from rlplug.run import run_dir
from rlplug.run.measure import Evaluation, MetricsLog, Schedule
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.trainer.trainer import Trainer
from rlplug.types import CheckpointError, ConfigError, Progress, Tree

METRIC_KEY = "curriculum.metric"


class Callbacks:
    """Implementation of ``run.report()``: logs, evaluates and writes checkpoints when they are due."""

    def __init__(self, policy: BehaviorPolicy, is_async: bool, estimator: Estimation | None, identity: str) -> None:
        self.identity = identity  # identity of the run, in its checkpoints and recorded files
        metric = policy.curriculum.metric if policy.curriculum else ""
        timed = metric.startswith(("time/", "system/", *["eval/"] * (policy.config.eval.timeout_s is not None)))
        if timed or (metric.startswith("eval/") and (is_async or not policy.config.eval.every)):
            why = "depends on the machine" if timed else "arrives late from an actor, or only at the end (eval.every=0)"
            raise ConfigError(METRIC_KEY, f"{metric} {why}, so tasks would not be reproducible; use another")
        self.stopping = Stopping(policy.config.stop or {}, {metric: METRIC_KEY} if metric else {})
        self.log = MetricsLog(policy.config.log, self.stopping)
        self.evaluation = Evaluation(policy, is_async)
        self.estimator = estimator  # of this rank
        self.estimation = Schedule(policy.config.eval.every, estimator is not None)
        self.row_log = FileRowLog()  # storage of buffer rows across checkpoints
        self.manager: CheckpointManager | None = None
        self.recorder: RunRecorder | None = None
        self.user = UserCallbacks(policy.config.callbacks, len(policy.ctx.env_ids))

    def open(self, trainer: Trainer) -> CheckpointManager:
        """Enable checkpoints."""
        self.manager = CheckpointManager(trainer.run_dir, trainer.config.checkpoint, trainer.steps)
        return self.manager

    def record(self, trainer: Trainer) -> None:
        """Enable recording of this rank's episodes."""
        name = f"{self.identity[:12]}-{trainer.ctx.rank}"
        files = episode_files(trainer.config, trainer.config.raw, trainer.ctx.spec, name)
        self.recorder = RunRecorder(files, len(trainer.ctx.env_ids))
        trainer.hooks.register(self.recorder)

    def ready_to_save(self) -> bool:
        return self.manager is not None and self.manager.idle

    def report(self, trainer: Trainer) -> None:
        """Implement ``Run.report``; raise ``Stopped`` if a metric has reached its limit."""
        self._report(trainer)
        if self.stopping.limits:
            self.stopping.read(vars(trainer.progress))
            self.stopping.reason = trainer.learner.placement.ranks.broadcast(self.stopping.reason)  # times differ
        if self.stopping.reason:
            raise Stopped

    def _report(self, trainer: Trainer) -> None:
        evaluation, score = self.evaluation, None
        if self.log.due(trainer) or evaluation.due(trainer):
            trainer.learner.check_finite()
        if self.log.due(trainer):
            self.log.log(trainer)
        self._poll_eval(trainer)
        if due := evaluation.due(trainer):
            if not evaluation.is_async:
                score = self.evaluate(trainer).get("eval/return_mean")
            else:
                self._poll_eval(trainer, wait=True)
                if evaluation.actors is not None:
                    evaluation.actors.begin(trainer.steps)
            evaluation.mark(trainer)
        if self.estimation.due(trainer):
            self._estimate(trainer)
        if (manager := self.manager) is None:
            return
        with trainer.clock.phase("checkpoint"):
            self._saved(trainer, manager.poll())
            best = score is not None and trainer.learner.placement.ranks.broadcast(manager.is_best(score))
            # asynchronous evaluations return their score later
            best = best or (due and evaluation.is_async and trainer.config.checkpoint.keep_best > 0)
            if best or (trainer.agreement.may_save and manager.due(trainer.steps)):
                if not due:
                    self._poll_eval(trainer, wait=True)
                trainer.learner.check_finite()
                self._saved(trainer, manager.submit(capture(trainer, score)))

    def save(self, trainer: Trainer) -> Path:
        """Write a checkpoint now, and return its folder."""
        assert self.manager is not None
        trainer.learner.check_finite()
        self._saved(trainer, self.manager.submit(capture(trainer)))
        self._saved(trainer, path := self.manager.wait())
        assert path is not None
        return path

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Evaluate and report the result; raise ``Stopped`` if a stop is requested meanwhile."""
        self._poll_eval(trainer, wait=True)
        self._evaluated(trainer, result := self.evaluation.run(trainer), trainer.steps)
        return result

    def _estimate(self, trainer: Trainer) -> None:
        """Log off-policy estimates with the current weights, unless there is no estimator."""
        if self.estimator is not None:
            with trainer.clock.phase("estimate"):
                self.estimation.latest = self.estimator.estimate(trainer.steps)
            self.estimation.mark(trainer)
            self.log.log_row(trainer, self.estimation.latest)

    def _evaluated(self, trainer: Trainer, result: dict[str, float], step: int) -> None:
        self.evaluation.latest, self.evaluation.latest_at = result, step
        trainer.hooks.hook.rlplug_evaluated(run=trainer, metrics=result)
        self.stopping.require(result, "eval/")
        self.log.log_row(trainer, result if step == trainer.steps else result | {f"eval/{trainer.loop.unit}": step})

    def _poll_eval(self, trainer: Trainer, wait: bool = False) -> None:
        """Report an asynchronous evaluation if it has finished."""
        if (actors := self.evaluation.actors) is None or not actors.playing:
            return
        with trainer.clock.phase("evaluate"):
            played = actors.wait(lambda: bool(trainer.agreement.asked) or not wait)
        if played is not None:
            result = self.evaluation.evaluator.metrics(played)
            self._evaluated(trainer, result, actors.env_steps)
            if self.manager is not None and "eval/return_mean" in result:
                self._saved(trainer, self.manager.set_score(actors.env_steps, result["eval/return_mean"]))

    def finish(self, trainer: Trainer) -> None:
        """Write the last row of metrics, evaluate, and write a checkpoint of the end of the loop."""
        trainer.learner.check_finite()
        self._poll_eval(trainer, wait=True)
        # before the evaluation, so that an extended run continues as if it had not ended
        snapshot = capture(trainer)
        if not trainer.agreement.stop:
            with suppress(Stopped):
                if trainer.steps > self.log.steps(trainer):
                    self.log.log(trainer)
                self._estimate(trainer)
                if self.evaluation.possible:
                    snapshot.manifest["score"] = self.evaluate(trainer).get("eval/return_mean")
        if self.manager is not None:
            self._saved(trainer, self.manager.submit(snapshot))
            self._saved(trainer, self.manager.wait())
        for metric in sorted(self.stopping.keys.keys() - self.stopping.seen):
            said = f"{metric} was never logged; {unknown(metric, self.stopping.seen)}"
            warnings.warn(f"{self.stopping.keys[metric]}: {said}", stacklevel=2)

    def _saved(self, trainer: Trainer, path: Path | None) -> None:
        if path is not None:
            trainer.hooks.hook.rlplug_checkpoint(run=trainer, path=str(path))

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()
        self.evaluation.close()


def capture(trainer: Trainer, score: float | None = None) -> Snapshot:
    """Copy the state of a run in memory, with the ``score`` of these weights if they were evaluated."""
    callbacks, plan, ctx, clock = trainer.reports, trainer.resolved.plan, trainer.ctx, trainer.clock
    own: dict[str, Tree] = {"context": ctx.state(), "global": global_state(ctx.device)}
    own |= {"normalizer": trainer.policy.normalizer.env_state(), "callbacks": callbacks.user.state()}
    trees, missing = {f"rank{ctx.rank}": own}, list[str]()
    if ctx.rank == 0:
        trees = {"weights": trainer.policy.state(), "learner": _learner(trainer)} | trees
    if trainer.learner.placement.collects:
        own |= trainer.stream_state() | {"recorder": callbacks.recorder and callbacks.recorder.state()}
        if trainer.config.checkpoint.buffer or ctx.needs.data == "rollout":  # a rollout is mostly empty now
            trainer.buffer.save(callbacks.row_log)
            own["buffer"] = callbacks.row_log.state
        if own["collector"]["env"] is None:
            missing.append("the environments: their state cannot be read, so new episodes begin")
    if plan.actors and max(trainer.loop.tempo.in_flight, trainer.loop.tempo.broadcast_interval) > 1:
        missing.append("rounds with older weights: actors play the next ones with the newest")
    wall = clock.wall()
    manifest = {"rlplug": metadata.version("rlplug"), "run": callbacks.identity, **vars(trainer.progress)}
    manifest |= {"written": datetime.now(UTC).isoformat(timespec="seconds"), "unit": trainer.loop.unit, "score": score}
    manifest |= {"wall_s": round(wall, 3), "since_logged_s": round(wall - callbacks.log.wall, 3)}
    manifest |= {"spent": dict(clock.spent), "not_restored": missing, "plugins": run_dir.origins(trainer.config)}
    manifest |= {"rollout_length": trainer.ctx.rollout_length, "batch_size": trainer.ctx.batch_size}
    manifest |= {"spec": to_json(ctx.spec), "config": trainer.config.raw}
    copies = {name: copy_to_host(part) for name, part in trees.items()}
    return Snapshot(manifest, copies, callbacks.row_log.chunks if "buffer" in own else [], ctx.rank, plan.world_size)


def _learner(trainer: Trainer) -> dict[str, Tree]:
    reports = {name: getattr(trainer.reports, name).state() for name in ("log", "evaluation", "estimation")}
    return trainer.state() | reports


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Restore a checkpoint into a new trainer of the same configuration; return notes on differences.

    Raises:
        ConfigError: the checkpoint has other spaces, another algorithm or number of ranks, or is damaged.
    """
    callbacks, path, manifest, rank = trainer.reports, checkpoint.path, checkpoint.manifest, trainer.ctx.rank
    owner = trainer.learner.placement.part  # rank that owns the data: rank 0 if all have the same
    if (ranks := checkpoint.ranks) != trainer.resolved.plan.world_size:
        said = f"{path} was written by {ranks} ranks, and needs as many again: hardware.devices={ranks}"
        raise ConfigError("hardware", said)
    try:
        if difference := mismatch(from_json(manifest["spec"]), trainer.ctx.spec):
            raise CheckpointError(f"{path} is of another environment: {difference}")
        weights, learner, data = (checkpoint.tree(name) for name in ("weights", "learner", f"rank{owner}"))
        check, row = partial(checked, trainer.ctx.spec.groups), trainer.collector.spec.row
        check({key: data.get(key) for key in ("collector", "buffer")})
        own: dict[str, Any] = data if owner == rank else checkpoint.tree(f"rank{rank}")
        episodes = {"episodes": trainer.episodes.state()}
        tree.check_like(_learner(trainer) | episodes, learner | {"episodes": data["episodes"]})
        trainer.clock.load(manifest["wall_s"], manifest["spent"])
        trainer.policy.load(weights)
        trainer.policy.normalizer.load_env_state(own["normalizer"])
        trainer.load(learner)
        tree.check_like(vars(Progress()), progress := vars(trainer.progress), "progress", exact=True)
        if not progress.items() <= manifest.items():
            raise ValueError("its counters do not match its manifest")
        callbacks.log.load(learner["log"], trainer.clock.wall() - manifest["since_logged_s"])
        callbacks.evaluation.load(learner["evaluation"])
        callbacks.estimation.load(learner["estimation"])
        trainer.load_stream(data)
        if callbacks.recorder is not None:
            callbacks.recorder.load(data["recorder"])
        callbacks.user.load(own["callbacks"])
        missing = manifest["not_restored"] + load_global_state(own["global"], trainer.ctx.device)
        if "buffer" in data:
            state, each = like_collected(row, data["buffer"]), lambda rows: like_collected(row, check(rows))
            callbacks.row_log = FileRowLog(checkpoint.chunks(owner), state, check=each)
            trainer.buffer.load(callbacks.row_log)
        else:
            said = "the buffer begins empty, as checkpoint.buffer=false left out its rows; learning goes on after"
            missing.append(f"{said} {trainer.begin_empty():,} more environment steps")
        return missing + trainer.ctx.load(own["context"], trainer.steps)
    except MISFITS as error:
        reason = next((line.strip() for line in str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} does not fit what is installed and configured now: {reason}") from error

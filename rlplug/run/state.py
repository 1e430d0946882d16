"""Everything that a run's future depends on, between two rounds: out of a trainer, and into a fresh one."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from typing import Any, cast

from rlplug.checkpointing.reading import Checkpoint
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.checkpointing.writing import Snapshot
from rlplug.distributed.rng import global_state, load_global_state
from rlplug.envs.spec_json import from_json, mismatch, to_json
from rlplug.run import run_dir
from rlplug.run.callbacks import Callbacks
from rlplug.trainer.trainer import Trainer
from rlplug.types import CheckpointError, ConfigError, Tree

MISFITS = (RuntimeError, KeyError, IndexError, ValueError, TypeError, AttributeError)
"""what components raise when they load the state of something else"""


def callbacks_of(trainer: Trainer) -> Callbacks:
    """Return what ``run.build`` made the trainer report to."""
    return cast(Callbacks, trainer.reports)


def capture(trainer: Trainer, score: float | None = None) -> Snapshot:
    """Copy the state of a run in memory, with the ``score`` of these very weights where they were evaluated."""
    callbacks, plan, ctx, clock = callbacks_of(trainer), trainer.resolved.plan, trainer.ctx, trainer.clock
    own: dict[str, Tree] = {
        "context": ctx.state(),
        "global": global_state(ctx.device),
        "normalizer": trainer.policy.normalizer.env_state(),
    }
    trees, missing = {f"rank{ctx.rank}": own}, list[str]()
    if ctx.rank == 0:
        reports = {"log": callbacks.log.state(), "evaluation": callbacks.evaluation.state()}
        trees = {"weights": trainer.policy.state(), "learner": trainer.state() | reports} | trees
    if _data_rank(trainer) == ctx.rank:
        trainer.buffer.save(callbacks.row_log)
        own |= trainer.stream_state() | {"buffer": callbacks.row_log.state}
        if own["collector"]["env"] is None:
            missing.append("the environments: their state cannot be read, so new episodes begin")
    if plan.actors and max(trainer.loop.in_flight, trainer.loop.broadcast_interval) > 1:
        missing.append("rounds with older weights: actors play the next ones with the newest")
    wall = clock.wall()
    manifest = {
        "rlplug": metadata.version("rlplug"),
        "run": callbacks.identity,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(trainer.progress),
        "score": score,
        "wall_s": round(wall, 3),
        "spent": dict(clock.spent),
        "since_logged_s": round(wall - callbacks.log.wall, 3),
        "not_restored": missing,
        "plugins": run_dir.origins(trainer.config),
        "spec": to_json(ctx.spec),
        "rollout_length": trainer.ctx.rollout_length,
        "batch_size": trainer.ctx.batch_size,
        "config": trainer.config.raw,
    }
    copies = {name: copy_to_host(tree) for name, tree in trees.items()}
    return Snapshot(manifest, copies, list(callbacks.row_log.chunks), ctx.rank, plan.world_size)


def _data_rank(trainer: Trainer) -> int:
    """Return the rank that writes this rank's stream and buffer: the first where all ranks hold the same."""
    return 0 if trainer.learner.replicated else trainer.ctx.rank


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Let a fresh trainer of the same configuration go on where the checkpoint was written.

    Returns:
        In words, what is not as it was.

    Raises:
        ConfigError: the checkpoint is of other spaces, another algorithm or another number of ranks, or damaged.
    """
    callbacks, path, manifest = callbacks_of(trainer), checkpoint.path, checkpoint.manifest
    owner, rank = _data_rank(trainer), trainer.ctx.rank
    if (ranks := checkpoint.ranks) != trainer.resolved.plan.world_size:
        said = f"{path} was written by {ranks} ranks, and continues on as many: hardware.devices={ranks}"
        raise ConfigError("hardware", said)
    try:
        if difference := mismatch(from_json(manifest["spec"]), trainer.ctx.spec):
            raise CheckpointError(f"{path} is of another environment: {difference}")
        weights, learner, data = (checkpoint.tree(name) for name in ("weights", "learner", f"rank{owner}"))
        own: dict[str, Any] = data if owner == rank else checkpoint.tree(f"rank{rank}")
        trainer.clock.load(manifest["wall_s"], manifest["spent"])
        trainer.policy.load(weights)
        trainer.policy.normalizer.load_env_state(own["normalizer"])
        trainer.load(learner)
        callbacks.log.load(learner["log"], trainer.clock.wall() - manifest["since_logged_s"])
        callbacks.evaluation.load(learner["evaluation"])
        trainer.load_stream(data)
        callbacks.row_log = FileRowLog(checkpoint.chunks(owner), data["buffer"])
        trainer.buffer.load(callbacks.row_log)
        missing = manifest["not_restored"] + load_global_state(own["global"], trainer.ctx.device)
        return missing + trainer.ctx.load(own["context"], trainer.progress.env_steps)
    except MISFITS as error:
        reason = next((line.strip() for line in str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} does not fit what is installed and configured now: {reason}") from error

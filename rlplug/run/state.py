"""Everything that a run's future depends on, between two rounds: out of a trainer, and into a fresh one."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rlplug.checkpointing.reading import Checkpoint
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.checkpointing.writing import Snapshot
from rlplug.distributed.rng import global_state, load_global_state
from rlplug.envs.spec_json import from_json, mismatch, to_json
from rlplug.run import run_dir
from rlplug.trainer.trainer import Trainer
from rlplug.types import CheckpointError, ConfigError, Tree

if TYPE_CHECKING:
    from rlplug.run.callbacks import Callbacks

MISFITS = (RuntimeError, KeyError, IndexError, ValueError, TypeError, AttributeError)
"""what components raise when they load the state of something else"""


def capture(trainer: Trainer, score: float | None = None) -> Snapshot:
    """Copy the state of a run in memory; writing it can take its time.

    Args:
        score: the evaluation of these very weights, where there is one.
    """
    callbacks: Callbacks = trainer.reports  # type: ignore[assignment]
    resolved, ctx, rank = trainer.resolved, trainer.ctx, trainer.ctx.rank
    trees: dict[str, Tree] = {}
    own: dict[str, Tree] = {
        "context": ctx.state(),
        "global": global_state(ctx.device),
        "normalizer": trainer.policy.normalizer.env_state(),
    }
    missing = []
    if rank == 0:
        trees["weights"] = trainer.policy.state()
        reports = {"log": callbacks.log.state(), "evaluation": callbacks.evaluation.state()}
        trees["learner"] = trainer.state() | reports
    if rank == data_rank(trainer):
        trainer.buffer.save(callbacks.row_log)
        own |= trainer.stream_state() | {"buffer": callbacks.row_log.state}
        if own["collector"]["env"] is None:
            missing.append("the environments: their state cannot be read, so new episodes begin")
    if (actors := resolved.plan.actors) and max(actors.max_requests_in_flight, actors.broadcast_interval) > 1:
        missing.append("rounds with older weights: actors play the next ones with the newest")
    trees[f"rank{rank}"] = own
    wall = trainer.clock.wall()
    manifest = {
        "rlplug": metadata.version("rlplug"),
        "run": callbacks.identity,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(trainer.progress),
        "score": score,
        "wall_s": round(wall, 3),
        "spent": dict(trainer.clock.spent),
        "since_logged_s": round(callbacks.log.since(wall), 3),
        "not_restored": missing,
        "plugins": run_dir.origins(trainer.config),
        "spec": to_json(ctx.spec),
        "rollout_length": trainer.loop.rollout_length,
        "batch_size": trainer.loop.batch_size,
        "config": trainer.config.raw,
    }
    copies = {name: copy_to_host(tree) for name, tree in trees.items()}
    return Snapshot(manifest, copies, list(callbacks.row_log.chunks), rank, resolved.plan.world_size)


def data_rank(trainer: Trainer) -> int:
    """Return the rank that writes this rank's stream and buffer: its own, or the first where all hold the same."""
    return 0 if trainer.learner.replicated else trainer.ctx.rank


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Let a fresh trainer of the same configuration go on where the checkpoint was written.

    Returns:
        In words, what is not as it was.

    Raises:
        CheckpointError: it is of other spaces or another algorithm, or damaged.
    """
    try:
        if (then := checkpoint.ranks) != trainer.resolved.plan.world_size:
            raise ConfigError(
                "hardware",
                f"{checkpoint.path} was written by {then} ranks, and continues on as many: hardware.devices={then}",
            )
        if difference := mismatch(from_json(checkpoint.manifest["spec"]), trainer.ctx.spec):
            raise CheckpointError(f"{checkpoint.path} is of another environment: {difference}")
        return _restore(trainer, checkpoint)
    except ConfigError:
        raise
    except MISFITS as error:
        reason = [line.strip() for line in str(error).splitlines()][:1] or [type(error).__name__]
        raise CheckpointError(
            f"{checkpoint.path} does not fit what is installed and configured now: {reason[0]}"
        ) from error


def _restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    callbacks: Callbacks = trainer.reports  # type: ignore[assignment]
    manifest, owner, rank = checkpoint.manifest, data_rank(trainer), trainer.ctx.rank
    weights, learner, data = (checkpoint.tree(name) for name in ("weights", "learner", f"rank{owner}"))
    own: dict[str, Any] = data if owner == rank else checkpoint.tree(f"rank{rank}")
    trainer.clock.load(manifest["wall_s"], manifest["spent"])
    trainer.policy.load(weights)
    trainer.policy.normalizer.load_env_state(own["normalizer"])
    trainer.load(learner)
    callbacks.log.load(learner["log"], trainer.clock.wall() - manifest["since_logged_s"])
    callbacks.evaluation.load(learner["evaluation"])
    trainer.load_stream(data)
    callbacks.row_log = FileRowLog(checkpoint.chunks(owner), data["buffer"], checkpoint.rows)
    trainer.buffer.load(callbacks.row_log)
    missing = manifest["not_restored"] + load_global_state(own["global"], trainer.ctx.device)
    return missing + trainer.ctx.load(own["context"], trainer.progress.env_steps)

"""Everything that a run's future depends on, between two rounds: out of a trainer, and into a fresh one."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

from rlplug.checkpointing.reading import Checkpoint
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.checkpointing.writing import Snapshot
from rlplug.distributed.rng import global_generators, set_global_generators
from rlplug.envs.spec_json import from_json, mismatch, to_json
from rlplug.run import run_dir as run_folder
from rlplug.types import CheckpointError, ConfigError, Tree

if TYPE_CHECKING:
    from rlplug.trainer.trainer import Trainer


MISFITS = (RuntimeError, KeyError, IndexError, ValueError, TypeError, AttributeError)
"""what components raise when they load the state of something else"""


def capture(trainer: Trainer, score: float | None = None) -> Snapshot:
    """A copy of the state in memory; writing it can take its time.

    Args:
        score: the evaluation of these very weights, where there is one.
    """
    rank, collector = trainer.ctx.rank, None
    trees: dict[str, Tree] = {}
    own: dict[str, Tree] = {
        "device": trainer.ctx.device.type,
        "generators": {role: generator.get_state() for role, generator in trainer.ctx.generators.items()},
        "global": global_generators(trainer.ctx.device),
    }
    if trainer.normalizer.reward is not None:
        own["returns"] = trainer.normalizer.returns  # of this rank's environments
    if rank == 0:
        trees["weights"] = {
            "algorithm": trainer.algorithm.state_dict(),
            "exploration": {name: extra.state_dict() for name, extra in trainer.exploration.items()},
            "preprocess": trainer.normalizer.state_dict(),
        }
        trees["learner"] = {
            "parts": trainer.learner.state(),
            "schedules": trainer.ctx.schedules.step,
            "progress": vars(trainer.progress),
            "reports": trainer.reports(),
        }
    if rank == _keeper_of_data(trainer):
        collector = trainer.collector.state()
        trainer.buffer.save(trainer.store)
        own |= {"collector": collector, "episodes": trainer.episodes.state(), "buffer": trainer.store.state}
    trees[f"rank{rank}"] = own
    missing = []
    if collector and collector["env"] is None:
        missing.append("the environments: their state cannot be read, so new episodes begin")
    if (cfg := trainer.plan.actors) and max(cfg.max_requests_in_flight, cfg.broadcast_interval) > 1:
        missing.append("rounds with older weights: actors play the next ones with the newest")
    manifest = {
        "rlplug": metadata.version("rlplug"),
        "run": trainer.identity,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(trainer.progress),
        "score": score,
        "wall_s": round(trainer.clock.wall(), 3),
        "spent": dict(trainer.clock.spent),
        "since_logged_s": round(trainer.since_logged, 3),
        "not_restored": missing,
        "plugins": run_folder.origins(trainer.config),
        "spec": to_json(trainer.ctx.spec),
        "rollout_length": trainer.loop.rollout_length,
        "batch_size": trainer.loop.batch_size,
        "config": trainer.config.raw,
    }
    return Snapshot(
        manifest,
        {name: copy_to_host(tree) for name, tree in trees.items()},
        list(trainer.store.chunks),
        rank,
        trainer.plan.world_size,
    )


def _keeper_of_data(trainer: Trainer) -> int:
    """The rank whose stream and buffer this rank's are: its own, or the first one's where all hold the same."""
    return 0 if trainer.replicated else trainer.ctx.rank


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Let a fresh trainer of the same configuration go on where the checkpoint was written.

    Returns:
        In words, what is not as it was.

    Raises:
        CheckpointError: it is of other spaces or another algorithm, or damaged.
    """
    try:
        if (then := checkpoint.ranks) != trainer.plan.world_size:
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
    manifest, device = checkpoint.manifest, trainer.ctx.device
    data = _keeper_of_data(trainer)
    weights, learner, rank = (checkpoint.tree(name) for name in ("weights", "learner", f"rank{data}"))
    own = rank if data == trainer.ctx.rank else checkpoint.tree(f"rank{trainer.ctx.rank}")
    trainer.store = FileRowLog(checkpoint.chunks(data), rank["buffer"], checkpoint.rows)
    trainer.clock.before = manifest["wall_s"]
    trainer.clock.spent.update(manifest["spent"])
    vars(trainer.progress).update(learner["progress"])
    trainer.algorithm.load_state_dict(weights["algorithm"])
    for name, extra in trainer.exploration.items():
        extra.load_state_dict(weights["exploration"][name])
    trainer.normalizer.load_state_dict(weights["preprocess"])
    if "returns" in own:
        trainer.normalizer.returns.copy_(own["returns"])
    trainer.learner.load(learner["parts"])
    trainer.ctx.schedules.refresh(learner["schedules"])
    trainer.load_reports(learner["reports"])
    trainer.since_logged = manifest["since_logged_s"]
    trainer.collector.load(rank["collector"])
    trainer.episodes.load(rank["episodes"])
    if rank["collector"]["env"] is None:
        trainer.episodes.forget()
    trainer.buffer.load(trainer.store)
    missing = manifest["not_restored"] + set_global_generators(own["global"], device)
    if own["device"] == device.type:
        for role, generator in trainer.ctx.generators.items():
            generator.set_state(own["generators"][role])
        return missing
    for generator in trainer.ctx.generators.values():
        generator.manual_seed(generator.initial_seed() + trainer.progress.env_steps)
    return [*missing, f"random numbers: they were drawn on {own['device']}, and are drawn anew on {device.type}"]

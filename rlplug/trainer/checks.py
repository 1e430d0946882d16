"""What can only be refused once spaces, components and the machine are known; before anything is written."""

from __future__ import annotations

import psutil

from rlplug.api import Exploration, Plan
from rlplug.config import RunConfig
from rlplug.trainer.context import needs_of
from rlplug.trainer.report import size
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec


def cross(config: RunConfig, spec: EnvSpec) -> None:
    """Do algorithm, buffer and exploration go together on these spaces?"""
    algo, needs = config.algo.name, needs_of(config.algo, config.models.values(), spec)
    if config.buffer.cls.stale and not needs.stale:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps data of earlier policies, which {algo} cannot learn from; leave it out",
        )
    if needs.stale and not config.buffer.cls.stale:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} gives the last round only, but {algo} learns from samples of a replay; leave it out",
        )
    if needs.episodes:
        raise ConfigError("algo", f"{algo} needs whole episodes, which nothing here keeps yet")
    if needs.stale and needs.carry_every and not _sequences(config):
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps no recurrent states, which {algo} needs for its recurrent model; take "
            "buffer=sequence, or a model without a state",
        )
    if _sequences(config) and not needs.carry_every:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps recurrent states, and the model has none; take buffer=replay or prioritized, "
            "or a recurrent model (model=lstm)",
        )
    if "mask" in spec.extras and "mask" not in needs.keys:
        raise ConfigError(
            "env.mask_key", f"the environment forbids actions, which {algo} does not heed; null plays without masks"
        )
    for name, chosen in config.exploration.items():
        changes = any(getattr(chosen.cls, what) is not getattr(Exploration, what) for what in ("perturb", "weights"))
        if changes and not needs.perturbed:
            raise ConfigError(
                f"exploration.{name}",
                f"changes actions after {algo} chose them, which {algo} cannot learn from; leave it out",
            )
    perturb = [name for name, chosen in config.exploration.items() if chosen.cls.perturb is not Exploration.perturb]
    for name in perturb[1:]:
        if config.exploration[name].cls.replaces:
            raise ConfigError(
                "exploration",
                f"{name} chooses actions anew, so that {perturb[0]} before it does nothing; leave one out, or name"
                f" {name} first",
            )


def shares(batch_size: int, plan: Plan) -> None:
    """Does every rank and microbatch get an equal share of a sample?"""
    parts = plan.world_size * plan.microbatches
    if batch_size % parts:
        near = batch_size - batch_size % parts
        raise ConfigError(
            "loop.train_batch_size",
            f"{batch_size} cannot be shared equally among {parts} ranks and microbatches; "
            + " or ".join(str(n) for n in (near, near + parts) if n)
            + " can",
        )


def fits(trainer: Trainer) -> None:
    """Is there time for one round, and memory for the buffer? Do the environments keep in step?"""
    config, needs = trainer.config, trainer.ctx.needs
    if needs.stale and needs.carry_every and not trainer.source.lockstep:
        raise ConfigError(
            "env",
            "these environments reset within the step that ends an episode, so that stored columns have gaps, over "
            "which no recurrent state can be kept; env.vectorization=list has none",
        )
    if config.eval.record:
        trainer.check_pictures()
    if config.total_steps < trainer.round_steps:
        raise ConfigError(
            "total_steps",
            f"{config.total_steps} is less than one round of collection, {trainer.round_steps} steps "
            f"(num_envs={config.num_envs} x {trainer.loop.rows} steps of each); raise it, or collect less in a round",
        )
    needed, free = trainer.buffer.nbytes(trainer.source.example()), psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            "buffer.capacity" if "capacity" in config.raw["buffer"] else "buffer",
            f"the buffer would need {size(needed)}, but only {size(free)} of memory are free; make it smaller",
        )


def _sequences(config: RunConfig) -> bool:
    return getattr(config.buffer.cls, "sequences", False)

"""What can only be refused once spaces, components and the machine are known; before anything is written."""

from __future__ import annotations

import psutil

from rlplug.api import Exploration, Plan
from rlplug.config import RunConfig
from rlplug.trainer.report import size
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec


def cross(config: RunConfig, spec: EnvSpec) -> None:
    """Do algorithm, buffer and exploration go together on these spaces?"""
    algo, needs = config.algo.name, config.algo.cls.needs(config.algo.cfg, spec)
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
    if needs.episodes or needs.carry_every or needs.burn_in:
        raise ConfigError(
            "algo", f"{algo} needs whole episodes or stored recurrent states, which nothing here keeps yet"
        )
    for name, chosen in config.exploration.items():
        if chosen.cls.perturb is not Exploration.perturb and not needs.perturbed:
            raise ConfigError(
                f"exploration.{name}",
                f"changes actions after {algo} chose them, which {algo} cannot learn from; leave it out",
            )


def shares(num_envs: int, batch_size: int, plan: Plan) -> None:
    """Does every rank and microbatch get an equal share?"""
    ranks = plan.devices * plan.num_nodes
    for key, whole, parts, of in (
        ("num_envs", num_envs, ranks, "ranks"),
        ("loop.train_batch_size", batch_size, ranks * plan.microbatches, "ranks and microbatches"),
    ):
        if whole % parts:
            near = whole - whole % parts
            raise ConfigError(
                key,
                f"{whole} cannot be shared equally among {parts} {of}; "
                + " or ".join(str(n) for n in (near, near + parts) if n)
                + " can",
            )


def sizes(trainer: Trainer) -> None:
    """Is there time for one round, and memory for the buffer?"""
    config = trainer.config
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

"""What can only be refused once spaces, components and the machine are known; before anything is written."""

from __future__ import annotations

import os

import psutil
import torch
from gymnasium.vector import AutoresetMode

from rlplug.api import Exploration, Plan
from rlplug.config import RunConfig
from rlplug.context import needs_of
from rlplug.plan import require_room
from rlplug.run.describe import size
from rlplug.trainer.policy import acts
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec


def cross(config: RunConfig, spec: EnvSpec) -> None:
    """Do algorithm, buffer and exploration go together on these spaces?"""
    algo, needs = config.algo.name, needs_of(config.algo, config.models.values(), spec)
    if config.buffer.cls.off_policy and not needs.off_policy:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps data of earlier policies, which {algo} cannot learn from; leave it out",
        )
    if needs.off_policy and not config.buffer.cls.off_policy:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} gives the last round only, but {algo} learns from samples of a replay; leave it out",
        )
    if needs.episodes:
        raise ConfigError("algo", f"{algo} needs whole episodes, which nothing here keeps yet")
    if needs.off_policy and needs.carry_stride and not _sequences(config):
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps no recurrent states, which {algo} needs for its recurrent model; take "
            "buffer=sequence, or a model without a state",
        )
    if _sequences(config) and not needs.carry_stride:
        raise ConfigError(
            "buffer",
            f"{config.buffer.name} keeps recurrent states, and the model has none; take buffer=replay or prioritized, "
            "or a recurrent model (model=lstm)",
        )
    if "action_mask" in spec.extras and "action_mask" not in needs.keys:
        raise ConfigError(
            "env.mask_key", f"the environment forbids actions, which {algo} does not heed; null plays without masks"
        )
    for name, chosen in config.exploration.items():
        if acts(chosen.cls) and not needs.perturbable:
            raise ConfigError(
                f"exploration.{name}",
                f"changes actions after {algo} chose them, which {algo} cannot learn from; leave it out",
            )
    perturb = [name for name, chosen in config.exploration.items() if chosen.cls.perturb is not Exploration.perturb]
    for name in perturb[1:]:
        if config.exploration[name].cls.overrides_action:
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


def actors(config: RunConfig, spec: EnvSpec, plan: Plan) -> None:
    """Does every actor get an equal share of the environments, every rank of the actors, and is there room for them?
    May the algorithm learn from what they play with older weights?"""
    cfg, ranks, num_envs = plan.actors, plan.world_size, config.num_envs
    if cfg is None:
        return
    late = {
        "max_requests_in_flight": cfg.max_requests_in_flight > 1,
        "broadcast_interval": cfg.broadcast_interval > 1,
    }
    off_policy = needs_of(config.algo, config.models.values(), spec).off_policy
    for option in [option for option, asked in late.items() if asked and not off_policy]:
        raise ConfigError(
            f"hardware.actors.{option}",
            f"lets actors play with older weights, which {config.algo.name} cannot learn from; 1 does not",
        )
    if cfg.count > num_envs:
        raise ConfigError(
            "hardware.actors.count",
            f"{cfg.count} actors are more than the environments, num_envs={num_envs}; take num_envs={cfg.count}, or"
            f" {num_envs} actors",
        )
    if num_envs % cfg.count:
        near = [str(n) for n in range(1, num_envs + 1) if num_envs % n == 0]
        raise ConfigError(
            "hardware.actors.count",
            f"num_envs={num_envs} cannot be shared equally among {cfg.count} actors; {' or '.join(near)} can",
        )
    if num_envs % ranks == 0 and cfg.count % ranks:
        raise ConfigError(
            "hardware.actors.count", f"{cfg.count} actors cannot be shared equally among {ranks} ranks; {ranks} can"
        )
    if plan.ray is not None and plan.ray.address is None:
        if plan.num_nodes > 1:
            raise ConfigError(
                "hardware.ray.address", f"actors for {plan.num_nodes} machines need a cluster of Ray that spans them"
            )
        require_room(plan, {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, "this machine")


def fits(trainer: Trainer) -> None:
    """Is there time for one round, and memory for the buffer? Do the environments keep in step?"""
    config, needs = trainer.config, trainer.ctx.needs
    if needs.off_policy and needs.carry_stride and trainer.collector.autoreset is not AutoresetMode.NEXT_STEP:
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
            f"(num_envs={config.num_envs} x {trainer.loop.rollout_length} steps of each); raise it, or collect less"
            " in a round",
        )
    device, ranks = getattr(trainer.buffer, "device", torch.device("cpu")), 1
    if trainer.plan.accelerator == "cuda" and config.raw["buffer"].get("device") == "learner" and device.type == "cpu":
        return  # it will be on devices of other processes, which look for themselves
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], f" of {torch.cuda.get_device_name(device)}"
    else:
        free, where = psutil.virtual_memory().available, ""
        ranks = 1 if trainer.plan.launcher == "ray" else trainer.plan.devices  # Ray places them where there is room
    needed = trainer.buffer.nbytes(trainer.collector.example()) * ranks
    if needed > free:
        whose = "the buffer" if ranks == 1 else f"the buffers of {ranks} ranks"
        raise ConfigError(
            "buffer.capacity" if "capacity" in config.raw["buffer"] else "buffer",
            f"{whose} would need {size(needed)}, but only {size(free)} of memory{where} are free; make it smaller",
        )


def _sequences(config: RunConfig) -> bool:
    return getattr(config.buffer.cls, "sequences", False)

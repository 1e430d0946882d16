"""What can only be refused once spaces, components and the machine are known; before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch
from gymnasium.vector import AutoresetMode

from rlplug import registry
from rlplug.api import Buffer, Collector, Exploration, Plan
from rlplug.context import ResolvedRun
from rlplug.plan import require_room
from rlplug.registry import Kind
from rlplug.run.describe import size
from rlplug.trainer.policy import changes_actions
from rlplug.types import ConfigError


def check(resolved: ResolvedRun) -> None:
    """Check that the parts of a run go together, and that shares are equal.

    Raises:
        ConfigError: they do not.
    """
    check_components(resolved)
    if resolved.config.buffer.cls.off_policy:  # otherwise no samples are drawn
        check_shares(resolved.loop.batch_size, resolved.plan)
    check_actors(resolved)


def check_components(resolved: ResolvedRun) -> None:
    """Check that algorithm, buffer, exploration and environment go together."""
    config, needs, spec = resolved.config, resolved.needs, resolved.spec
    algo, name, buffer = config.algo.name, config.buffer.name, config.buffer.cls
    if buffer.off_policy and not needs.off_policy:
        raise ConfigError(
            "buffer", f"{name} keeps data of earlier policies, which {algo} cannot learn from; leave it out"
        )
    if needs.off_policy and not buffer.off_policy:
        raise ConfigError(
            "buffer", f"{name} gives the last round only, but {algo} learns from samples of a replay; leave it out"
        )
    if needs.episodes:
        raise ConfigError("algo", f"{algo} needs whole episodes, which nothing here keeps yet")
    if needs.off_policy and needs.carry_stride and not buffer.sequences:
        others = _options("buffer", lambda cls: cls.sequences)
        raise ConfigError(
            "buffer",
            f"{name} keeps no recurrent states, which {algo} needs for its recurrent model; take {others}, or a model "
            "without a state",
        )
    if buffer.sequences and not needs.carry_stride:
        others = _options("buffer", lambda cls: cls.off_policy and not cls.sequences)
        models = _options("model", lambda cls: cls.recurrent)
        raise ConfigError(
            "buffer",
            f"{name} keeps recurrent states, and the model has none; take {others}, or a recurrent model: {models}",
        )
    if "action_mask" in spec.extras and "action_mask" not in needs.keys:
        raise ConfigError(
            "env.mask_key", f"the environment forbids actions, which {algo} does not heed; null plays without masks"
        )
    for key, chosen in config.exploration.items():
        if changes_actions(chosen.cls) and not needs.perturbable:
            raise ConfigError(
                f"exploration.{key}",
                f"changes actions after {algo} chose them, which {algo} cannot learn from; leave it out",
            )
    perturb = [key for key, chosen in config.exploration.items() if chosen.cls.perturb is not Exploration.perturb]
    for key in perturb[1:]:
        if config.exploration[key].cls.overrides_action:
            raise ConfigError(
                "exploration",
                f"{key} replaces the action, so that {perturb[0]} before it has no effect; leave one out, or name"
                f" {key} first",
            )


def _options(kind: Kind, fits: Callable[[Any], bool]) -> str:
    """Return the components of a kind that fit, as one writes them: ``buffer=replay or prioritized``."""
    found = []
    for name in registry.names(kind):
        with suppress(ConfigError):  # what cannot be imported is no way out
            found += [name] if fits(registry.load(kind, name)) else []
    return f"{kind}={' or '.join(found)}"


def check_shares(batch_size: int, plan: Plan) -> None:
    """Check that every rank and microbatch gets an equal share of a sample."""
    parts = plan.world_size * plan.microbatches
    if batch_size % parts:
        near = batch_size - batch_size % parts
        raise ConfigError(
            "loop.train_batch_size",
            f"{batch_size} cannot be shared equally among {parts} ranks and microbatches; "
            + " or ".join(str(n) for n in (near, near + parts) if n)
            + " can",
        )


def check_actors(resolved: ResolvedRun) -> None:
    """Check that actors and ranks get equal shares, that there is room for them, and that older weights may play."""
    config, plan = resolved.config, resolved.plan
    cfg, ranks, num_envs = plan.actors, plan.world_size, config.num_envs
    if cfg is None:
        return
    late = {
        "max_requests_in_flight": cfg.max_requests_in_flight > 1,
        "broadcast_interval": cfg.broadcast_interval > 1,
    }
    for option in [option for option, asked in late.items() if asked and not resolved.needs.off_policy]:
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


def check_fit(resolved: ResolvedRun, buffer: Buffer, collector: Collector, elsewhere: bool) -> None:
    """Check that there is time for one round, and memory for the buffer, and that columns keep in step where they must.

    Args:
        elsewhere: the run's devices belong to other processes, which look at their memory themselves.
    """
    config, needs, plan = resolved.config, resolved.needs, resolved.plan
    if needs.off_policy and needs.carry_stride and collector.autoreset is not AutoresetMode.NEXT_STEP:
        raise ConfigError(
            "env",
            "these environments reset within the step that ends an episode, so that stored columns have gaps, over "
            "which no recurrent state can be kept; env.vectorization=list has none",
        )
    length = resolved.loop.rollout_length
    if config.total_steps < length * config.num_envs:
        raise ConfigError(
            "total_steps",
            f"{config.total_steps} is less than one round of collection, {length * config.num_envs} steps "
            f"(num_envs={config.num_envs} x {length} steps of each); raise it, or collect less in a round",
        )
    if elsewhere and plan.accelerator == "cuda":
        return
    if buffer.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(buffer.device)[0], f" of {torch.cuda.get_device_name(buffer.device)}"
        ranks = 1
    else:
        free, where = psutil.virtual_memory().available, ""
        ranks = 1 if plan.launcher == "ray" else plan.devices  # Ray places them where there is room
    needed = buffer.nbytes(collector.example()) * ranks
    if needed > free:
        whose = "the buffer" if ranks == 1 else f"the buffers of {ranks} ranks"
        raise ConfigError(
            buffer.size_key,
            f"{whose} would need {size(needed)}, but only {size(free)} of memory{where} are free; make it smaller",
        )

"""What can only be refused once spaces, components and the machine are known; before anything is written."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil
import torch
from gymnasium.vector import AutoresetMode

from rlplug import registry
from rlplug.api import Buffer, Data, Exploration, Loop, Needs, Plan
from rlplug.config import RunConfig, show
from rlplug.context import ResolvedRun
from rlplug.plan import require_room
from rlplug.registry import Kind
from rlplug.trainer.policy import changes_actions
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

WHAT: dict[Data, str] = {
    "rollout": "the last round",
    "segments": "segments in order",
    "windows": "windows of older data",
    "episodes": "whole episodes",
}

FOR_EVER = 10**12  # environment steps
BESIDE_WEIGHTS = 3  # bytes that learning takes for each of theirs: a gradient, and Adam's two moments


def check(resolved: ResolvedRun) -> None:
    """Raise ``ConfigError`` unless components go together, and ranks and actors get equal shares."""
    config, needs, algo = resolved.config, resolved.needs, resolved.config.algo.name
    _check_loop(config, needs)
    _check_buffer(config, needs)
    _check_data(resolved)
    if resolved.spec.has_masks and "action_mask" not in needs.keys:
        plain = ("env.mask_key", "null plays without them")
        key, way = ("env", "take an algorithm that does") if resolved.spec.has_agents else plain
        raise ConfigError(key, f"{algo} does not heed masks of allowed actions; {way}")
    for key, chosen in config.exploration.items():
        if changes_actions(chosen.cls) and not needs.perturbable:
            raise ConfigError(f"exploration.{key}", f"changes actions, which {algo} cannot learn from; leave it out")
        if chosen.cls.intrinsic_reward is not Exploration.intrinsic_reward and (needs.gradients or not needs.rewards):
            why = "computes its gradients where it acts" if needs.gradients else "learns from no rewards"
            said = f"rewards what the learner samples, and {algo} {why}; leave it out"
            raise ConfigError(f"exploration.{key}", said)
        if resolved.spec.has_agents and not chosen.cls.knows_agents:
            said = "knows environments of one agent alone, and this one has several; leave it out"
            raise ConfigError(f"exploration.{key}", said)
    acting = any(changes_actions(chosen.cls) for chosen in config.exploration.values())
    if needs.noise and config.exploration and not acting:  # exploration=[] is on purpose
        said = f"{algo} always plays what seems best to it, and tries nothing else"
        raise ConfigError("exploration", f"{said}; take exploration=[{','.join([needs.noise, *config.exploration])}]")
    perturb = [key for key, chosen in config.exploration.items() if chosen.cls.perturb is not Exploration.perturb]
    for key in perturb[1:]:
        if config.exploration[key].cls.overrides_action:
            way = f"leave one out, or name {key} first"
            raise ConfigError("exploration", f"{key} replaces the action of {perturb[0]}; {way}")
    if needs.data != "rollout":  # which is given whole
        check_shares(resolved.config.train_batch_size, resolved.plan)
    for option, plain in (("microbatches", 1), ("precision", "32-true")):
        if needs.gradients and getattr(resolved.plan, option) != plain:
            said = f"is for gradients that the learner computes, and {algo}'s are computed where it plays; take {plain}"
            raise ConfigError(f"hardware.{option}", said)
    if "priority" in needs.keys:
        _check_priorities(config, needs)
    for option in ("in_flight", "broadcast_interval"):
        if getattr(resolved.loop, option) > 1 and not needs.off_policy and not needs.gradients:
            raise ConfigError(f"loop.{option}", f"lets older weights play, which {algo} cannot learn from; take 1")
    if resolved.plan.actors is not None:
        _check_actors(resolved)
    if (plan := resolved.plan).ray is not None and (address := plan.ray.address) is None:
        require_room(plan, {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, "this machine")
    elif plan.ray is not None and not re.fullmatch(".+:[0-9]+", address):
        raise ConfigError("hardware.ray.address", f"{address!r} is not host:port, as ray start --head prints it")


def _gives(buffer: type[Buffer], needs: Needs) -> bool:
    sequences = needs.data != "windows" or buffer.sequences == bool(needs.carry_stride)
    return sequences and needs.data in buffer.gives and not _outdated(buffer, needs)


def _outdated(buffer: type[Buffer], needs: Needs) -> bool:
    """Does it give what an algorithm has learned from already, which is then data of an older policy?"""
    return needs.data == "segments" and not needs.off_policy and bool(buffer.repeats)


def _has_rows(buffer: type[Buffer], loop: type[Loop]) -> bool:
    return ("collected" if loop.collects else "stored") in buffer.sources


def _check_loop(config: RunConfig, needs: Needs) -> None:
    """Check that a loop can drive an algorithm, and that it collects if the buffer has no rows of its own."""
    name, loop, buffer, algorithm = config.loop.name, config.loop.cls, config.buffer.cls, config.algo.cls
    if why := loop.refusal(algorithm, needs):
        ways = _options("loop", lambda cls: cls.refusal(algorithm, needs) is None)
        raise ConfigError("loop", f"{name} {why}; take {ways}")
    if not _has_rows(buffer, loop):
        buffers = _options("buffer", lambda cls: _has_rows(cls, loop) and _gives(cls, needs))
        # what needs a recording is no way out
        loops = _options(
            "loop", lambda cls: _has_rows(buffer, cls) and not (cls.reads or cls.refusal(algorithm, needs))
        )
        takes = f"collects, and {config.buffer.name} holds its own rows alone"
        lacks = f"collects nothing, and {config.buffer.name} holds nothing else"
        ways = " or ".join(way for way in (buffers, loops) if not way.endswith("="))
        raise ConfigError("loop", f"{name} {takes if loop.collects else lacks}; take {ways}")


def _check_buffer(config: RunConfig, needs: Needs) -> None:
    """Check that a buffer gives what an algorithm learns from, and keeps recurrent states if they are needed."""
    buffer, name, algo, loop = config.buffer.cls, config.buffer.name, config.algo.name, config.loop.cls
    if needs.data == "windows" and not needs.off_policy:
        raise ConfigError("algo", f"{algo} learns from {WHAT[needs.data]}, so its Needs should say off_policy=True")
    if _gives(buffer, needs):
        return
    ways = _options("buffer", lambda cls: _gives(cls, needs) and _has_rows(cls, loop))
    if needs.data not in buffer.gives:
        given = " or ".join(WHAT[data] for data in sorted(buffer.gives))
        raise ConfigError("buffer", f"{name} gives {given}, but {algo} learns from {WHAT[needs.data]}; take {ways}")
    if _outdated(buffer, needs):
        why = f"gives segments several times, but {algo} does not correct for older policies"
    elif needs.carry_stride:
        why = f"keeps no recurrent states, which {algo}'s model needs"
        ways += ", or a model without a state"
    else:
        why = "keeps recurrent states, and the model has none"
        ways += f", or a recurrent model: {_options('model', lambda cls: cls.recurrent)}"
    raise ConfigError("buffer", f"{name} {why}; take {ways}")


def _check_priorities(config: RunConfig, needs: Needs) -> None:
    """Check that first priorities, which actors compute, are of use, and come from weights that are what they seem."""
    buffer, algo = config.buffer, config.algo.name
    if not getattr(buffer.cls, "prioritizes", False):
        fits = _options("buffer", lambda cls: getattr(cls, "prioritizes", False) and _gives(cls, needs))
        raise ConfigError("buffer", f"{buffer.name} draws by no priority, and {algo}'s actors compute it; take {fits}")
    for key, chosen in config.exploration.items():
        if chosen.cls.perturb_weights is not Exploration.perturb_weights:
            said = f"changes the weights by which {algo}'s actors compute first priorities; leave it out"
            raise ConfigError(f"exploration.{key}", said)


def _check_data(resolved: ResolvedRun) -> None:
    """Check that nothing is asked of a recording that only an environment can do, and that a loop for one has one."""
    config, algo = resolved.config, resolved.config.algo.name
    if not config.env.cls.traits.playable and (config.data.path is None or config.data.envs is not None):
        raise ConfigError("env", f"{config.env.name} plays nothing: it is for data.path=<files> alone")
    if config.record.path is not None and config.record.format == "json" and resolved.spec.has_agents:
        raise ConfigError("record.format", "json lines are of one agent; take parquet")
    if config.data.path is None:
        if resolved.loop.reads:
            said = f"{config.loop.name} learns from recorded episodes: name files, data.path=<folder>"
            raise ConfigError("data.path", f"loop={said}, or take loop=alternate")
        return
    why = "and data.path plays nothing"
    if not resolved.needs.off_policy:
        raise ConfigError("data.path", f"{algo} learns from what it does itself alone; a recording cannot serve it")
    if config.data.envs is not None:
        why = "and data.path is recorded"
        if config.data.envs >= config.num_envs:
            said = f"{config.data.envs} of num_envs={config.num_envs} leave none to be played; take null, or raise"
            raise ConfigError("data.envs", f"{said} num_envs")
        if resolved.loop.reads or resolved.plan.world_size > 1:
            said = f"loop={config.loop.name} reads alone" if resolved.loop.reads else "several ranks share columns out"
            raise ConfigError("data.envs", f"{said}; take null")
    for key, chosen in config.exploration.items():
        if changes_actions(chosen.cls) and config.data.envs is None:
            raise ConfigError(f"exploration.{key}", f"changes what is played, {why}; leave it out: exploration=[]")
    if resolved.plan.actors is not None and resolved.plan.actors.count:
        raise ConfigError("hardware.actors.count", f"actors play, {why}; take 0")
    if config.record.path is not None:
        raise ConfigError("record.path", f"writes down what is played, {why}; take null")
    for option in ("in_flight", "broadcast_interval"):
        if getattr(resolved.loop, option) > 1:
            way = "offline" if config.data.envs is None else "alternate"
            raise ConfigError(f"loop.{option}", f"is for who plays, {why}; take loop={way}")


def _options(kind: Kind, fits: Callable[[Any], bool]) -> str:
    """Return the components of a kind that fit, as one writes them: ``buffer=replay or prioritized``."""
    found: list[str] = []
    for name in registry.names(kind):
        with suppress(ConfigError):  # what cannot be imported is no way out
            found += [name] if fits(registry.load(kind, name)) else []
    return f"{kind}={' or '.join(found)}"


def check_shares(batch_size: int, plan: Plan) -> None:
    """Check that every rank and microbatch gets an equal share of a sample."""
    parts = plan.world_size * plan.microbatches
    if rest := batch_size % parts:
        near = [n for n in (batch_size - rest, batch_size - rest + parts) if n]
        raise _uneven("train_batch_size", str(batch_size), f"{parts} ranks and microbatches", near)


def _uneven(key: str, what: str, whom: str, right: Iterable[int]) -> ConfigError:
    return ConfigError(key, f"{what} cannot be shared equally among {whom}; {' or '.join(map(str, right))} can")


def _check_actors(resolved: ResolvedRun) -> None:
    """Check that actors and ranks get equal shares, and that there is room for them."""
    plan, ranks, num_envs = resolved.plan, resolved.plan.world_size, resolved.config.num_envs
    cfg: Any = plan.actors
    if num_envs % cfg.count:
        divisors = [n for n in range(1, num_envs + 1) if num_envs % n == 0]
        raise _uneven("hardware.actors.count", f"num_envs={num_envs}", f"{cfg.count} actors", divisors)
    if num_envs % ranks == 0 and cfg.count % ranks:
        raise _uneven("hardware.actors.count", f"{cfg.count} actors", f"{ranks} ranks", [ranks])
    if resolved.loop.preemption_threshold is not None and ranks > 1:
        said = "ends rollouts that ranks play, and here actors play them; take hardware.actors.count=0 or null"
        raise ConfigError("loop.preemption_threshold", said)
    if cfg.num_aggregation_workers and resolved.loop.shards is not None:
        said = "is for rounds of all actors, and this loop takes segments one by one; take 0"
        raise ConfigError("hardware.actors.num_aggregation_workers", said)
    if plan.ray is not None and plan.ray.address is None and plan.num_nodes > 1:
        said = f"actors for {plan.num_nodes} machines need a cluster of Ray that spans them"
        raise ConfigError("hardware.ray.address", said)


def check_fit(trainer: Trainer, elsewhere: bool) -> None:
    """Check that the run has time for one round, memory for its buffer, and environments that serve its algorithm."""
    config, needs, plan, buffer = trainer.config, trainer.resolved.needs, trainer.resolved.plan, trainer.buffer
    autoreset = trainer.collector.spec.autoreset
    if needs.data == "windows" and needs.carry_stride and autoreset is not AutoresetMode.NEXT_STEP:
        said = "resets within the step that ends an episode, which leaves gaps in what is stored, and a recurrent state"
        raise ConfigError("env", f"{said} cannot be kept over them; env.vectorization=list leaves none")
    for key, chosen in config.exploration.items():
        if chosen.cls.perturb_weights is not Exploration.perturb_weights and not [*trainer.algorithm.parameters()]:
            raise ConfigError(f"exploration.{key}", f"changes weights, and {config.algo.name} has none; leave it out")
    if trainer.loop.one_pass and (capacity := getattr(config.buffer.cfg, "capacity", None)) is not None:
        needed = trainer.collector.spec.rows * config.num_envs
        if needs.data in ("windows", "episodes") and capacity < needed:
            said = f"{capacity} rows do not hold the recording, which has {needed}; raise it"
            raise ConfigError(buffer.size_key, f"{said}, or take loop.stream=true, which reads while it learns")
    total, length = config.total_steps, trainer.ctx.rollout_length
    if trainer.loop.unit == "env_steps":
        each = f"{(steps := length * config.num_envs)} steps (num_envs={config.num_envs} x {length} steps of each)"
        if total < steps:
            raise ConfigError("total_steps", f"{total} is less than one round of collection, {each}; raise it")
        if trainer.loop.one_pass and (whole := trainer.collector.spec.steps or total) < total:
            said = f"{total} is more than the {whole} steps of the recording, which loop={config.loop.name} reads once"
            raise ConfigError("total_steps", f"{said}; take {whole} or less")
        trains = any(p.requires_grad for p in trainer.algorithm.parameters())
        made, more = (trainer.loop.updates(n) for n in (total // steps * steps, FOR_EVER))
        if trains and made == 0 != more:  # a loop that cannot say says 0 of all
            tempo = ["num_steps_sampled_before_learning_starts", "replay_ratio"]
            tempo += ["train_batch_size"] if needs.data == "segments" else []
            why = ", ".join([f"{key}={show(getattr(config, key))}" for key in tempo])
            raise ConfigError(
                "total_steps", f"{total} leaves no time for one update: {why}, rounds of {each}; raise it"
            )
        first = buffer.warm_up * config.num_envs // len(trainer.ctx.env_ids)
        if trains and total < first:
            said = f"{total} leaves no time for one update: a first sample of buffer={config.buffer.name} takes {first}"
            raise ConfigError("total_steps", f"{said} steps; raise it")
    if elsewhere and plan.accelerator == "cuda":
        return  # the processes that have the devices check their memory
    if buffer.device.type == "cuda":
        free, where, ranks = torch.cuda.mem_get_info(buffer.device)[0], torch.cuda.get_device_name(buffer.device), 1
    else:  # Ray places ranks where there is room
        free, where = psutil.virtual_memory().available, "this machine"
        ranks = 1 if plan.launcher == "ray" else plan.devices
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and (room := limit - psutil.Process().memory_info().vms) * ranks < free:
            free, where = room * ranks, "this process (ulimit -v)"
    stored = buffer.nbytes(trainer.collector.spec.row)
    learned = sum(p.nbytes for p in trainer.algorithm.parameters() if p.requires_grad) * BESIDE_WEIGHTS
    whose = "the buffer" if ranks == 1 else f"the buffers of {ranks} ranks"
    for key, what, needed in ((buffer.size_key, whose, stored), ("model", "what the networks learn with", learned)):
        if needed * ranks > free:
            room = f"only {size(free)} of memory of {where} are free"
            raise ConfigError(key, f"{what} would need {size(needed * ranks)}, but {room}; make it smaller")


def lacking(error: Exception) -> str | None:
    """Return what there was no memory for, in words; None for an error of another kind."""
    said = str(error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in said:
        return None
    found = re.search(r"allocate ([0-9]+) bytes|allocate ([0-9.]+ [KMGT]?i?B)", said)
    return "more" if found is None else f"a tensor of {found[2] or size(int(found[1]))}"


def size(n: float) -> str:
    """Return bytes in the unit that a person would choose."""
    power = min(max(int(n).bit_length() - 1, 0) // 10, 4)
    return f"{n / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

"""Checks that need spaces, components and the machine, made before anything is written.

Every generator is a table, with a row of condition, key and sentence for each error.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain
from typing import Any

import psutil
import torch
from gymnasium.vector import AutoresetMode

from rlplug import registry
from rlplug.agents import changes_actions
from rlplug.api import Buffer, Data, Exploration, Loop, Needs
from rlplug.config import show
from rlplug.config.errors import Refusals, refuse
from rlplug.context import ResolvedRun
from rlplug.data import advice
from rlplug.plan import require_room
from rlplug.registry import Kind
from rlplug.terminal import size
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

WHAT: dict[Data, str] = {
    "rollout": "the last round",
    "segments": "segments in order",
    "windows": "windows of older data",
    "episodes": "whole episodes",
}

FOR_EVER = 10**12  # environment steps
BESIDE_WEIGHTS = 3  # bytes per byte of weights: a gradient and Adam's two moments


def check(resolved: ResolvedRun) -> None:
    """Raise ``ConfigError`` unless components are compatible, and ranks and actors get equal shares."""
    rows = (_loop, _buffer, advice.refusals, _exploration, _curriculum, _hardware)
    refuse(chain.from_iterable(of(resolved) for of in rows))
    if ((plan := resolved.plan).actors is not None or plan.launcher == "ray") and find_spec("ray") is None:
        key = "hardware" if plan.actors is None else "hardware.actors.count"
        raise ConfigError(key, "Ray, which starts the processes, is not installed: pip install 'rlplug[ray]'")
    if plan.ray is not None and plan.ray.address is None:
        require_room(plan, {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, "this machine")


# fmt: off
def _loop(run: ResolvedRun) -> Refusals:
    """Check that the loop can drive the algorithm, and collects unless the buffer brings its own rows."""
    needs, name, loop, algorithm, buffer = (
        run.needs, run.config.loop.name, run.config.loop.cls, run.config.algo.cls, run.config.buffer)
    does = (f"collects, but {buffer.name} brings its own rows" if loop.collects
            else f"does not collect, but {buffer.name} stores collected rows")

    def ways() -> str:
        buffers = _options("buffer", lambda cls: _has_rows(cls, loop) and _gives(cls, needs))
        loops = _options("loop", lambda cls: _has_rows(buffer.cls, cls) and not (  # not one for datasets
            cls.reads or cls.refusal(algorithm, needs)))
        return " or ".join(way for way in (buffers, loops) if not way.endswith("="))

    yield (why := loop.refusal(algorithm, needs), "loop", lambda:
           f"{name} {why}; use {_options('loop', lambda cls: cls.refusal(algorithm, needs) is None)}")
    yield (not _has_rows(buffer.cls, loop), "loop", lambda:
           f"{name} {does}; use {ways()}")
    yield (not run.config.checkpoint.buffer and (run.loop.one_pass or not loop.collects), "checkpoint.buffer",
           f"false leaves out rows that are collected again, but {name} reads them once; use true")
    for option, plain in {"normalize_obs": 0, "normalize_reward": 0, "scale_reward": 1, "clip_reward": None}.items():
        why = ("plans with a simulator" if needs.simulates else "adapts to raw rows" if needs.raw
               else "compares their returns" if option.endswith("reward") and not run.loop.gives_rows else "")
        yield (why and getattr(run.config.preprocess, option) != plain, f"preprocess.{option}",
               f"changes the environment's rows, but {run.config.algo.name} {why}; use the default")
    for option in ("in_flight", "broadcast_interval"):
        yield (getattr(run.loop.tempo, option) > 1 and not needs.off_policy and not needs.gradients, f"loop.{option}",
               f"collects with older weights, which {run.config.algo.name} does not support; use 1")


def _buffer(run: ResolvedRun) -> Refusals:
    """Check that the buffer provides the algorithm's kind of samples, and recurrent states if needed."""
    needs, algo, name, buffer = run.needs, run.config.algo.name, run.config.buffer.name, run.config.buffer.cls

    def ways() -> str:
        return _options("buffer", lambda cls: _gives(cls, needs) and _has_rows(cls, run.config.loop.cls))

    yield (needs.data == "windows" and not needs.off_policy, "algo",
           f"{algo} learns from {WHAT[needs.data]}, so its Needs must set off_policy=True")
    yield (needs.data not in buffer.gives, "buffer", lambda:
           f"{name} gives {' or '.join(WHAT[data] for data in sorted(buffer.gives))}, but {algo} learns from "
           f"{WHAT[needs.data]}; use {ways()}")
    yield (_outdated(buffer, needs), "buffer", lambda:
           f"{name} gives segments several times, but {algo} does not correct for older policies; use {ways()}")
    yield (not _gives(buffer, needs) and needs.window.stride, "buffer", lambda:
           f"{name} keeps no recurrent states, which {algo}'s model needs; use {ways()}, or a model without a state")
    yield (not _gives(buffer, needs), "buffer", lambda:
           f"{name} keeps recurrent states, but the model has none; use {ways()}, or a recurrent model: "
           f"{_options('model', lambda cls: cls.recurrent)}")
    yield ("priority" in needs.keys and not buffer.prioritizes, "buffer", lambda:
           f"{name} has no priorities, but {algo}'s actors compute them; use "
           f"{_options('buffer', lambda cls: getattr(cls, 'prioritizes', False) and _gives(cls, needs))}")


def _exploration(run: ResolvedRun) -> Refusals:
    """Check that the algorithm supports the environment's masks, and exploration modules fit the algorithm."""
    needs, algo, modules = run.needs, run.config.algo.name, run.config.exploration
    key, way = ("env", "use an algorithm that does") if run.spec.has_agents else (
        "env.mask_key", "null runs without masks")
    yield (run.spec.has_masks and "action_mask" not in needs.keys, key,
           f"{algo} does not support action masks; {way}")
    why = ("computes gradients in its actors" if needs.gradients else "uses no rewards" if not needs.rewards
           else "" if run.loop.gives_rows else f"learns from no rows with loop={run.config.loop.name}")
    perturb = [key for key, chosen in modules.items() if chosen.cls.perturb is not Exploration.perturb]
    for key, chosen in modules.items():
        cls, at = chosen.cls, f"exploration.{key}"
        yield (changes_actions(cls) and not needs.perturbable, at,
               f"changes actions, which {algo} cannot learn from; leave it out")
        yield (cls.intrinsic_reward is not Exploration.intrinsic_reward and why, at,
               f"rewards rows that the learner samples, but {algo} {why}; leave it out")
        yield (run.spec.has_agents and cls.perturb_weights is not Exploration.perturb_weights and not cls.knows_agents,
               at, "changes the weights of one agent, but the environment has several; leave it out")
        yield ("priority" in needs.keys and cls.perturb_weights is not Exploration.perturb_weights, at,
               f"changes the weights by which {algo}'s actors compute initial priorities; leave it out")
        yield (key in perturb[1:] and cls.overrides_action, "exploration",
               f"{key} replaces the action of {''.join(perturb[:1])}; leave one out, or name {key} first")
    acting = any(changes_actions(chosen.cls) for chosen in modules.values())
    yield (needs.noise and modules and not acting, "exploration",  # exploration=[] is deliberate
           f"{algo} acts greedily; needs an exploration module: "
           f"exploration=[{','.join([str(needs.noise), *modules])}]")


def _curriculum(run: ResolvedRun) -> Refusals:
    """Check that a curriculum has tasks to choose, and episodes to choose them for."""
    if (chosen := run.config.curriculum) is None:
        return
    yield (run.spec.tasks is None, "curriculum",
           f"{chosen.name} chooses tasks, but the environment has none; env=frozenlake_tasks has some, or leave it out")
    yield (run.config.data.path is not None, "curriculum",
           f"{chosen.name} chooses the tasks of new episodes, but data.path is recorded; leave it out")
    yield (run.loop.plays, "curriculum",
           f"{chosen.name} chooses the tasks of rollouts, but loop={run.config.loop.name} plays jobs; leave it out")


def _hardware(run: ResolvedRun) -> Refusals:
    """Check that ranks, microbatches and actors get equal shares of samples and environments."""
    plan, ranks, num_envs, needs, algo = (
        run.plan, run.plan.world_size, run.config.num_envs, run.needs, run.config.algo.name)
    size, rollout, whole = run.config.train_batch_size, run.config.rollout_fragment_length, run.whole_segments
    rows, parts = rollout * (1 if num_envs % ranks else ranks), ranks * plan.microbatches
    yield (needs.data != "rollout" and size % parts, "train_batch_size", _uneven(  # a rollout is not sampled
           f"{size}", f"{parts} ranks and microbatches", range(size - size % parts or parts, size + parts, parts)))
    yield (needs.gradients and size % whole and (whole % size or size % rows), "train_batch_size", lambda:
           f"{size} transitions are not whole rollouts of {rollout} steps that divide the {whole // rows} environments "
           f"of a process; use {' or '.join(str(n) for n in range(rows, whole + 1, rows) if whole % n == 0)}")
    for option, plain in (("microbatches", 1), ("precision", "32-true")):
        yield (needs.gradients and getattr(plan, option) != plain, f"hardware.{option}", "applies to gradients of "
               f"the learner, but {algo}'s actors compute them; use the default")
    if (actors := plan.actors) is not None:
        count, key = actors.count, "hardware.actors.count"
        yield num_envs % count, key, _uneven(f"num_envs={num_envs}", f"{count} actors", (
            n for n in range(1, num_envs + 1) if num_envs % n == 0))
        yield num_envs % ranks == 0 and count % ranks, key, _uneven(f"{count} actors", f"{ranks} ranks", [ranks])
        yield (run.loop.preemption is not None and ranks > 1, "loop.preemption_threshold",
               "ends rollouts of ranks, but actors collect here; use hardware.actors.count=0 or null")
        some = run.loop.tempo.shards is not None
        yield (actors.num_aggregation_workers and some, "hardware.actors.num_aggregation_workers",
               "applies to rounds of all actors, but this loop receives segments one by one; use 0")
    if plan.ray is not None:
        at, address = "hardware.ray.address", plan.ray.address
        yield (plan.actors is not None and address is None and plan.num_nodes > 1, at,
               f"actors for {plan.num_nodes} machines need a Ray cluster that spans them")
        yield (address is not None and not re.fullmatch(".+:[0-9]+", address), at,
               f"{address!r} is not host:port, as ray start --head prints it")
# fmt: on


def _uneven(what: str, whom: str, right: Iterable[int]) -> Callable[[], str]:
    return lambda: f"{what} cannot be shared equally among {whom}; use {' or '.join(map(str, right))}"


def _gives(buffer: type[Buffer], needs: Needs) -> bool:
    sequences = needs.data != "windows" or buffer.sequences == bool(needs.window.stride)
    return sequences and needs.data in buffer.gives and not _outdated(buffer, needs)


def _outdated(buffer: type[Buffer], needs: Needs) -> bool:
    """Return whether it returns data again, which is then from an older policy."""
    return needs.data == "segments" and not needs.off_policy and bool(buffer.repeats)


def _has_rows(buffer: type[Buffer], loop: type[Loop]) -> bool:
    return ("collected" if loop.collects else "stored") in buffer.sources


def _options(kind: Kind, fits: Callable[[Any], bool]) -> str:
    """Return the components of a kind that fit, as an override: ``buffer=replay or prioritized``."""
    found: list[str] = []
    for name in registry.names(kind):
        with suppress(ConfigError):  # do not suggest components that cannot be imported
            found += [name] if fits(registry.load(kind, name)) else []
    return f"{kind}={' or '.join(found)}"


def check_fit(trainer: Trainer, elsewhere: bool) -> None:
    """Check that the run has steps for one round, memory for its buffer, and compatible environments."""
    refuse(chain(_parts(trainer), advice.misfits(trainer), _time(trainer) if trainer.loop.unit == "env_steps" else ()))
    if not (elsewhere and trainer.resolved.plan.accelerator == "cuda"):  # its processes check their memory
        refuse(_memory(trainer))


# fmt: off
def _parts(trainer: Trainer) -> Refusals:
    """Check environments and weights against algorithm, exploration modules and buffer."""
    config, needs, spec = trainer.config, trainer.resolved.needs, trainer.collector.spec
    strided = needs.data == "windows" and needs.window.stride
    yield (strided and spec.autoreset is not AutoresetMode.NEXT_STEP, "env",
           "resets within the step that ends an episode, which leaves gaps in the stored rows, over which no recurrent "
           "state can be kept; use env.vectorization=list")
    yield (config.optimizer != "adam" and not any(p.requires_grad for p in trainer.algorithm.parameters()),
           "optimizer", f"replaces Adam, but {config.algo.name} makes no gradient steps; leave it out")
    for key, chosen in config.exploration.items():
        changes = chosen.cls.perturb_weights is not Exploration.perturb_weights
        yield (changes and not [*trainer.algorithm.parameters()], f"exploration.{key}",
               f"changes weights, but {config.algo.name} has none; leave it out")


def _time(trainer: Trainer) -> Refusals:
    """Check that the run has steps for a round of collection, and for an update if it trains."""
    config, total, length = trainer.config, trainer.config.total_steps, trainer.ctx.rollout_length
    each = f"{(steps := length * config.num_envs)} steps (num_envs={config.num_envs} x {length} steps of each)"
    yield total < steps, "total_steps", f"{total} is less than one round of collection, {each}; raise it"
    if any(p.requires_grad for p in trainer.algorithm.parameters()):
        tempo = ["num_steps_sampled_before_learning_starts", "replay_ratio"]
        tempo += ["train_batch_size"] if trainer.resolved.needs.data == "segments" else []
        why = ", ".join(f"{key}={show(getattr(config, key))}" for key in tempo)
        made, more = (trainer.loop.updates(n) for n in (total // steps * steps, FOR_EVER))
        yield (made == 0 != more, "total_steps",  # a loop without an estimate returns 0 for all
               f"{total} steps are too few for an update: {why}, rounds of {each}; raise it")
        first = trainer.buffer.warm_up * config.num_envs // len(trainer.ctx.env_ids)
        yield (total < first, "total_steps", f"{total} steps are too few for an update: "
               f"a first sample of buffer={config.buffer.name} takes {first} steps; raise it")


def _memory(trainer: Trainer) -> Refusals:
    """Check that the device or this machine has memory for buffers and networks."""
    buffer, plan = trainer.buffer, trainer.resolved.plan
    ranks = 1 if plan.launcher == "ray" or buffer.device.type == "cuda" else plan.devices  # Ray places by resources
    if buffer.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(buffer.device)[0], torch.cuda.get_device_name(buffer.device)
    else:
        free, where = psutil.virtual_memory().available, "this machine"
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and (room := limit - psutil.Process().memory_info().vms) * ranks < free:
            free, where = room * ranks, "this process (ulimit -v)"
    stored = buffer.nbytes(trainer.collector.spec.row) * ranks
    learned = sum(p.nbytes for p in trainer.algorithm.parameters() if p.requires_grad) * BESIDE_WEIGHTS * ranks
    whose = "the buffer" if ranks == 1 else f"the buffers of {ranks} ranks"
    for key, what, needed in ((buffer.size_key, whose, stored), ("model", "gradients and optimizer states", learned)):
        yield (needed > free, key, f"{what} would need {size(needed)}, but {where} has only {size(free)} of "
               "free memory; make it smaller")
# fmt: on


@contextmanager
def memory(failure: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``failure`` with a description if the body runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error)
        if "size calculation overflowed" in said:
            raise failure("a tensor of more than 8 EiB") from None
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in said:
            raise
        found = re.search(r"allocate ([0-9]+) bytes|allocate ([0-9.]+ [KMGT]?i?B)", said)
        raise failure("more" if found is None else f"a tensor of {found[2] or size(int(found[1]))}") from None

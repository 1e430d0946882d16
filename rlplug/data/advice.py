"""Refusals of runs that cannot learn from their dataset, and suggestions of offline algorithms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rlplug import registry
from rlplug.agents import changes_actions
from rlplug.config import RunConfig, choose
from rlplug.config.errors import Refusals
from rlplug.context import ResolvedRun
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec

LOOP = re.compile(r"override /loop: *(\w+)")


@contextmanager
def of_recordings(config: RunConfig, spec: EnvSpec) -> Iterator[None]:
    """Add suggestions of offline algorithms to an error about ``algo``, if the run has a dataset."""
    try:
        yield
    except ConfigError as error:
        if error.key != "algo" or config.data.path is None or not (ways := serving(spec)):
            raise
        said = f"use algo={' or '.join(ways)}, which learn from datasets"
        raise ConfigError("algo", f"{error.message.partition('; ')[0]}; {said}") from None


def serving(spec: EnvSpec) -> list[str]:
    """Return the algorithms whose YAML chooses a loop for datasets, and which support these spaces."""
    from rlplug.config import default_node  # here, because it imports Hydra

    found: list[str] = []
    for name in registry.names("algo"):
        file = registry.preset("algo", name)
        loops = LOOP.findall(file.path.read_text(encoding="utf-8")) if file else []
        with suppress(ConfigError):  # do not suggest components that cannot be imported
            if any(registry.load("loop", loop).reads for loop in loops):
                choose("algo", "algo", default_node("algo", name)).needs(spec)
                found.append(name)
    return found


# fmt: off
def refusals(run: ResolvedRun) -> Refusals:
    """Check that a dataset does not have to act as an environment, and that a loop for datasets has one."""
    config, algo, data, ranks = run.config, run.config.algo.name, run.config.data, run.plan.world_size
    yield (not config.env.cls.traits.playable and (data.path is None or data.envs is not None), "env",
           f"{config.env.name} has only a dataset: set data.path=<files>")
    yield (config.record.path is not None and config.record.format == "json" and run.spec.has_agents, "record.format",
           "JSON lines support one agent; use parquet")
    yield (data.path is None and run.loop.reads, "data.path", f"loop={config.loop.name} learns from recorded "
           "episodes: set data.path=<folder>, or use loop=alternate")
    if data.path is None:
        return
    why, loop = ("but data.path collects nothing", "offline") if data.envs is None else (
        "but data.path is recorded", "alternate")
    yield (not run.needs.off_policy, "data.path",
           f"{algo} learns only from data that it collects itself, not from a dataset")
    yield ((data.envs or 0) >= config.num_envs, "data.envs",
           f"{data.envs} of num_envs={config.num_envs} leave no real environment; use null, or raise num_envs")
    yield (data.envs and run.loop.reads, "data.envs", f"loop={config.loop.name} only reads datasets; use null")
    yield (data.envs and ranks > 1, "data.envs",
           "several ranks cannot share recorded and real environments; use null")
    for key, chosen in config.exploration.items():
        yield (changes_actions(chosen.cls) and data.envs is None, f"exploration.{key}",
               f"changes actions, {why}; leave it out: exploration=[]")
    yield (run.plan.actors is not None and run.plan.actors.count, "hardware.actors.count",
           f"actors collect, {why}; use 0")
    yield config.record.path is not None, "record.path", f"records collected episodes, {why}; use null"
    for option in ("in_flight", "broadcast_interval"):
        yield getattr(run.loop.tempo, option) > 1, f"loop.{option}", f"applies to collection, {why}; use loop={loop}"


def misfits(trainer: Trainer) -> Refusals:
    """Check the length of a dataset that is read once against buffer and run."""
    config, spec, needs = trainer.config, trainer.collector.spec, trainer.resolved.needs
    capacity, rows = getattr(config.buffer.cfg, "capacity", None), spec.rows * config.num_envs
    kept = trainer.loop.one_pass and capacity is not None and needs.data in ("windows", "episodes")
    yield (kept and capacity < rows, trainer.buffer.size_key,
           f"{capacity} rows do not hold the {rows} rows of the dataset; raise it, or set loop.stream=true, "
           "which reads during training")
    counted = trainer.loop.one_pass and trainer.loop.unit == "env_steps"
    total, recorded = config.total_steps, spec.steps or config.total_steps
    yield (counted and recorded < total, "total_steps",
           f"{total} is more than the {recorded} steps of the dataset, which loop={config.loop.name} reads once; "
           f"use {recorded} or less")
# fmt: on

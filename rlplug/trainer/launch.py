"""From a validated configuration to a finished run folder."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.fabric import Fabric

from rlplug.api import Plan
from rlplug.config import RunConfig
from rlplug.trainer import folder as run_folder
from rlplug.trainer.context import RunContext, Scope
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec


def train(config: RunConfig, folder: Path, command: Sequence[str] = ()) -> float:
    """Run ``config`` and write everything about it into ``folder``.

    Returns:
        The mean return of the final evaluation: the score that sweepers maximise.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        KeyboardInterrupt: the run was stopped by Ctrl-C, and its folder says so.
    """
    trainer = build(config, folder)
    loggers = [chosen.build(trainer.ctx) for chosen in config.logger.values()]
    run_folder.create(trainer, command)
    for logger in loggers:
        trainer.hooks.register(logger)
    status = "failed"
    try:
        with _stop_on_signal(trainer):
            trainer.run()
        status = "interrupted" if trainer.stopping else "finished"
    finally:
        summary = trainer.summary(status)
        run_folder.write_json(folder / "summary.json", summary)
        trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
        trainer.close()
    if trainer.stopping:
        raise KeyboardInterrupt
    return trainer.evaluation["eval/return_mean"]


def build(config: RunConfig, folder: Path) -> Trainer:
    """Everything a run consists of, checked, with nothing written yet.

    Raises:
        ConfigError: see ``train``.
    """
    plan = config.hardware.build(None).plan()
    _set_up_torch(plan, config.deterministic)
    fabric = Fabric(accelerator=plan.accelerator, devices=plan.devices, num_nodes=plan.num_nodes, precision=plan.precision)
    fabric.launch()
    trainer = Trainer(config, folder, plan, fabric, read_spec(config))
    _check_sizes(trainer)
    return trainer


def read_spec(config: RunConfig) -> EnvSpec:
    """The spaces of the configured environment: one is made and closed."""
    nothing = EnvSpec({})
    env = config.env.build(RunContext(spec=nothing, seed=config.seed).derive(scope=Scope("learner", 1, range(1))))
    env.close()
    return env.spec


def _set_up_torch(plan: Plan, deterministic: bool) -> None:
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision(plan.float32_matmul_precision)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def _check_sizes(trainer: Trainer) -> None:
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
            "buffer" + (".capacity" if hasattr(config.buffer.cfg, "capacity") else ""),
            f"the buffer needs {_bytes(needed)}, but only {_bytes(free)} of memory are free; choose a smaller one",
        )


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C asks the run to end after this round; a second one ends it at once."""

    def ask(number: int, frame: Any) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = True

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- check ------------------------------------------------------------------------------------------------------------


def check(config: RunConfig) -> str:
    """The plan of a run, without training: spaces, modules, memory, devices, updates to come.

    Raises:
        ConfigError: the run could not start.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = build(config, Path())
    group, plan, rounds = trainer.ctx.spec.sole, trainer.plan, config.total_steps // trainer.round_steps
    row = trainer.source.example()
    modules = [("algo", config.algo.name, trainer.algorithm)]
    modules += [("exploration", name, extra) for name, extra in trainer.exploration.items()]
    lines = [
        f"algo         {config.algo.name}",
        f"env          {config.raw['env'].get('id', config.env.name)}, {config.num_envs} at a time, "
        f"at most {trainer.ctx.spec.max_episode_steps or 'unlimited'} steps an episode",
        f"  obs        {group.obs}",
        f"  action     {group.action}",
    ]
    for kind, name, module in modules:
        lines.append(f"{kind:<12} {name}, {_count(module):,} parameters")
        for child, inner in module.named_children():
            lines.append(f"  {child:<10} {type(inner).__name__}, {_count(inner):,}")
    lines += [
        f"buffer       {config.buffer.name}, {_bytes(trainer.buffer.nbytes(row))}",
        f"  a row      " + ", ".join(f"{key} {_shape(leaf)}" for key, leaf in row.items()),
        f"hardware     {plan.devices} x {trainer.fabric.device.type}, {plan.precision}, {plan.threads} thread(s), "
        f"matrix products {plan.float32_matmul_precision}",
        f"loop         {config.loop.name}: rounds of {trainer.round_steps} steps, {config.total_steps:,} steps in all",
        f"updates      {trainer.loop.updates(rounds * trainer.round_steps):,}",
    ]
    trainer.close()
    return "\n".join(lines)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shape(leaf: Any) -> str:
    if isinstance(leaf, dict):
        return "{" + ", ".join(f"{key} {_shape(inner)}" for key, inner in leaf.items()) + "}"
    return f"{list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"


def _bytes(n: int) -> str:
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"

"""From a validated configuration to a finished run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from rlplug.api import Plan
from rlplug.config import RunConfig
from rlplug.trainer import checks
from rlplug.trainer import folder as run_folder
from rlplug.trainer.context import RunContext, Scope
from rlplug.trainer.report import describe
from rlplug.trainer.trainer import Trainer
from rlplug.types import EnvSpec


def train(config: RunConfig, folder: Path, command: Sequence[str] = ()) -> float:
    """Run ``config`` and write everything about it into ``folder``.

    Returns:
        The mean return of the final evaluation: the score that sweepers maximise.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        KeyboardInterrupt: the run was stopped by Ctrl-C, and its folder says so.
    """
    trainer = build(config, folder)
    with closing(trainer):
        loggers = [chosen.build(trainer.ctx) for chosen in config.logger.values()]
        run_folder.create(trainer, command)
        for logger in loggers:
            trainer.hooks.register(logger)
        trainer.hooks.check_pending()
        status = "failed"
        try:
            with _stop_on_signal(trainer):
                trainer.run()
            if trainer.stopping:
                raise KeyboardInterrupt
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            summary = trainer.summary(status)
            run_folder.write_json(folder / "summary.json", summary)
            trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
    return trainer.evaluation["eval/return_mean"]


def check(config: RunConfig) -> str:
    """The plan of a run, in words, without training.

    Raises:
        ConfigError: the run could not start.
    """
    with closing(build(config, Path())) as trainer:
        return describe(trainer)


def build(config: RunConfig, folder: Path) -> Trainer:
    """Everything a run consists of, checked, with nothing written yet.

    Raises:
        ConfigError: see ``train``.
    """
    plan = config.hardware.build(None).plan()
    spec = read_spec(config)
    checks.cross(config, spec)
    loop = config.loop.build(RunContext(spec=spec, num_envs=config.num_envs))
    checks.shares(config.num_envs, loop.batch_size, plan)
    _set_up_torch(plan, config.deterministic)
    fabric = Fabric(
        accelerator=plan.accelerator, devices=plan.devices, num_nodes=plan.num_nodes, precision=plan.precision
    )
    fabric.launch()
    trainer = Trainer(config, folder, plan, fabric, spec, loop)
    try:
        checks.sizes(trainer)
    except BaseException:
        trainer.close()
        raise
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

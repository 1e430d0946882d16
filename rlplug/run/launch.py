"""From a validated configuration to a finished run folder."""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from rlplug.api import Plan
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.reading import Checkpoint, checkpoints, find, tidy
from rlplug.config import Chosen, RunConfig, choose, migrate, parse, show
from rlplug.config.overrides import RESUMABLE, WHY, change, differences, told
from rlplug.config.run import chosen_name
from rlplug.distributed.fabric import fabric_of, launched_elsewhere, require_started
from rlplug.distributed.signals import handling
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.distributed.wires import listening
from rlplug.registry.installed import check_installed, check_same, installed
from rlplug.run import checks
from rlplug.run import run_dir as run_folder
from rlplug.run.describe import describe
from rlplug.run.state import restore
from rlplug.trainer.policy import loop_of, read_spec
from rlplug.trainer.trainer import Trainer
from rlplug.types import CheckpointError, ConfigError, RunError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR)
"""the disk's fault, or that of what somebody put there"""
STOPPING = b"\nrlplug: stopping after this round, with a checkpoint; Ctrl-C again: at once, without one\n"


def train(config: RunConfig, folder: Path, command: Sequence[str] = (), tell: Callable[[str], None] = print) -> float:
    """Run ``config`` and write everything about it into ``folder``.

    Args:
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation: the score that sweepers maximise.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        RunError: the run could not go on.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM, and its folder says so; it holds the signal.
    """
    return _launched(config.hardware, lambda: config, folder, tell, _train, config.raw, folder, list(command))


def resume(path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = print) -> float | None:
    """Continue a run where its newest good checkpoint was written.

    Args:
        path: the run folder.
        overrides: changes to what does not alter learning, as on the command line.
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation; None for a run that has finished already.

    Raises:
        ConfigError: the run cannot be continued (so); nothing was written.
        RunError, KeyboardInterrupt: as in ``train``.
    """
    folder = Path(path)
    raw, manifest = run_folder.read(folder)
    new = change(raw, overrides, RESUMABLE, WHY)
    check_installed(_kept(new, manifest))
    hardware = choose("hardware", "hardware", new["hardware"])
    return _launched(hardware, lambda: parse(new), folder, tell, _resume, folder, list(overrides))


def _kept(raw: dict[str, Any], manifest: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Where the components come from that are as they were when the run began."""
    return {key: origin for key, origin in manifest["plugins"].items() if chosen_name(raw, key) == origin["name"]}


def _launched(
    hardware: Chosen,
    config: Callable[[], RunConfig],
    folder: Path,
    tell: Callable[[str], None],
    work: Any,
    *args: Any,
) -> Any:
    """``work(fabric, tell, *args)`` on every rank: in this process if it is the only one or was started as one of
    them, else in processes of their own, which continue what broke off as often as they may."""
    plan: Plan = hardware.build(None).plan()
    on_ray = plan.launcher == "ray"
    require_started(plan)
    if launched_elsewhere() or (plan.world_size == 1 and not plan.max_restarts and not on_ray):
        return work(fabric_of(plan), tell, *args)
    if plan.num_nodes > 1:
        raise ConfigError(
            "hardware.num_nodes", f"{plan.num_nodes} machines: start rlplug by torchrun or srun on each of them"
        )
    with closing(build(config(), folder)):
        pass  # what is wrong is found before any process is started
    if on_ray:
        from rlplug.actors.launcher import on_cluster as start
    else:
        start = spawn_ranks
    restarts = plan.max_restarts
    while True:
        try:
            return start(plan, work, *args, tell=tell)
        except RunError as error:
            if not restarts or not checkpoints(folder):
                if isinstance(error, RankError):  # it had no time to say this itself
                    raise RankError(_with_way_back(error, folder, next(iter(checkpoints(folder)), None))) from None
                raise
            restarts -= 1
            tell(f"{error}\ncontinuing by itself, {restarts} more times if need be")
            work, args = _resume, (folder, [])


def _train(fabric: Fabric, tell: Callable[[str], None], raw: dict[str, Any], folder: Path, command: list[str]) -> float:
    raw, folder = fabric.broadcast((raw, folder))
    check_same_versions(fabric)
    config = parse(raw)
    with closing(build(config, folder, fabric)) as trainer, _disk(folder):
        trainer.start()
        loggers = _loggers(trainer)
        if fabric.is_global_zero:
            run_folder.require_new(folder)
        with _written(folder, fabric, "hydra.run.dir"):
            if fabric.is_global_zero:
                run_folder.create(folder, config, trainer.plan, trainer.identity, command)
            return _drive(trainer, loggers)


def _resume(fabric: Fabric, tell: Callable[[str], None], folder: Path, overrides: list[str]) -> float | None:
    if not fabric.is_global_zero:
        tell = _nobody
    check_same_versions(fabric)
    raw, manifest = run_folder.read(folder)
    new = change(raw, overrides, RESUMABLE, WHY)
    changed = differences(raw, new)
    with _disk(folder), _written(folder, fabric):
        for note in (*check_installed(_kept(new, manifest)), *run_folder.other_versions(manifest)):
            tell(note)
        config = parse(new)
        checkpoint = find(folder, tell=tell) if fabric.is_global_zero and checkpoints(folder) else None
        path = fabric.broadcast(checkpoint and checkpoint.path)
        if path is not None:
            checkpoint = checkpoint or Checkpoint(path)
            _check_own(checkpoint, manifest["run"], config)
        done = run_folder.finished(folder)
        made = checkpoint.manifest["env_steps"] if checkpoint is not None else None
        over = config.total_steps == raw["total_steps"] if made is None else config.total_steps - made < config.num_envs
        if done and over:
            tell(f"{folder} has finished: {done}. To go on, give it more than total_steps={config.total_steps}")
            return None
        if done and checkpoint is None:
            raise CheckpointError(f"{folder} has finished, and its checkpoints are gone: nothing to go on from")
        with closing(build(config, folder, fabric)) as trainer:
            trainer.identity = manifest["run"]
            trainer.start()
            missing = restore(trainer, checkpoint) if checkpoint is not None else []
            loggers = _loggers(trainer)
            for line in told(changed):
                tell(line)
            steps = trainer.progress.env_steps
            tell(f"continuing from {f'step {steps:,}' if checkpoint else 'the beginning: there was no checkpoint yet'}")
            for what in missing:
                tell(f"not exactly as it would have gone on: {what}")
            fabric.barrier()  # every rank has read what it needs
            if fabric.is_global_zero:
                for aside in tidy(folder, checkpoint):
                    tell(f"what is damaged was set aside as {aside}")
                run_folder.note_resumed(folder, config, manifest, steps, changed)
            return _drive(trainer, loggers)


def _nobody(line: str) -> None:
    """Is told by all ranks but the first."""


def _written(folder: Path, fabric: Fabric, key: str = "") -> AbstractContextManager[None]:
    """The first rank writes into the folder, for all."""
    return run_folder.locked(folder, key) if fabric.is_global_zero else nullcontext()


def check_same_versions(fabric: Fabric) -> None:
    """Does this rank run what the first one runs?

    Raises:
        ConfigError: another version of rlplug, of a library or of a plugin is installed here, or none.
    """
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")


def _check_own(checkpoint: Checkpoint, run: str, config: RunConfig) -> None:
    """Can the run ``run``, as it is configured now, continue from ``checkpoint``?

    Raises:
        ConfigError: it is another run's, or the configuration was changed where it may not be.
    """
    if checkpoint.manifest["run"] != run:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of another run")
    for key, old, new in differences(migrate(checkpoint.manifest["config"]), config.raw):
        if key.split(".")[0] not in RESUMABLE:
            raise ConfigError(key, f"was {show(old)}, and is {show(new)} in config.yaml now, but {WHY}")
    made, total = checkpoint.manifest["env_steps"], config.total_steps
    if total < made:
        raise ConfigError("total_steps", f"{total} is less than the {made} steps that the run has made already")


def _loggers(trainer: Trainer) -> list[Any]:
    """The first rank speaks for all."""
    if not trainer.fabric.is_global_zero:
        return []
    return [chosen.build(trainer.ctx) for chosen in trainer.config.logger.values()]


def _drive(trainer: Trainer, loggers: Sequence[Any]) -> float:
    """From the first hook to the last."""
    for logger in loggers:
        trainer.hooks.register(logger)
    trainer.hooks.check_pending()
    trainer.keeper = CheckpointManager(
        trainer.folder, trainer.config.checkpoint, trainer.progress.env_steps, trainer.fabric.is_global_zero
    )
    status = "failed"
    try:
        with _disk(trainer.folder), _stop_on_signal(trainer), _denormals_flushed(), _machines_heard(trainer):
            trainer.run()
        if trainer.stopping:
            raise KeyboardInterrupt(trainer.stopping)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except RunError as error:
        raise RunError(_with_way_back(error, trainer.folder, _last(trainer))) from error.__cause__
    except Exception as error:
        error.add_note(_way_back(trainer.folder, _last(trainer)))
        raise
    finally:
        _end(trainer, status)
    return trainer.evaluation.get("eval/return_mean", math.nan)


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Numbers below 1e-38 count as zero in this thread, and in those that it starts.

    The optimiser's moments of weights that have no gradient any more decay into such numbers, and processors take some
    twenty times as long for each.
    """
    flushed = (torch.full((1,), 1e-39) * 1).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def _machines_heard(trainer: Trainer) -> AbstractContextManager[None]:
    """Where there are several, the run ends once one is gone."""
    if trainer.plan.num_nodes == 1:
        return nullcontext()

    def end(what: str) -> None:
        if trainer.fabric.local_rank == 0:
            said = _with_way_back(RankError(what), trainer.folder, next(iter(checkpoints(trainer.folder)), None))
            os.write(2, f"rlplug: {said}\n".encode())
        os._exit(1)  # the main thread may wait inside of a collective

    return listening(trainer.fabric, end)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A full or broken disk is no bug: one message."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(f"{error.filename or folder}: {error.strerror}") from None


def _end(trainer: Trainer, status: str) -> None:
    if not trainer.fabric.is_global_zero:
        return
    summary = trainer.summary(status)
    try:
        try:
            run_folder.write_json(trainer.folder / "summary.json", summary)
        finally:
            trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
    except OSError as error:
        if status == "finished":
            raise RunError(f"{trainer.folder}: {error.strerror}; {_way_back(trainer.folder, _last(trainer))}") from None


def _last(trainer: Trainer) -> Path | None:
    assert trainer.keeper is not None
    with suppress(RunError):
        trainer.keeper.wait()
    return trainer.keeper.last


def _with_way_back(error: RunError, folder: Path, last: Path | None) -> str:
    """Behind an error of one line, or below one of several."""
    said = str(error)
    return said + ("\n" if "\n" in said else "; ") + _way_back(folder, last)


def _way_back(folder: Path, last: Path | None) -> str:
    """What is left, and how to go on."""
    good = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}"
    return f"{good}; continue with: python -m rlplug resume {folder}"


def check(config: RunConfig) -> str:
    """The plan of a run, in words, without training.

    Raises:
        ConfigError: the run could not start.
    """
    with closing(build(config, Path())) as trainer:
        return describe(trainer)


def build(config: RunConfig, folder: Path, fabric: Fabric | None = None, plan: Plan | None = None) -> Trainer:
    """Everything a run consists of, checked, with nothing written yet.

    Args:
        fabric: of this rank. None: there is this process alone, which builds what the first rank will have; where
            ranks are processes of their own, on the processor.
        plan: another one than the hardware's.

    Raises:
        ConfigError: see ``train``.
    """
    own: Plan = config.hardware.build(None).plan() if plan is None else plan
    spec = read_spec(config)
    checks.cross(config, spec)
    loop = loop_of(config, spec)
    if config.buffer.cls.off_policy:  # else no samples are drawn
        checks.shares(loop.batch_size, own)
    checks.actors(config, spec, own)
    set_up_torch(own, config.deterministic)
    if fabric is None:
        alone = replace(own, devices=1, num_nodes=1)
        elsewhere = own.world_size > 1 or own.launcher == "ray"
        fabric = fabric_of(replace(alone, accelerator="cpu", precision="32-true") if elsewhere else alone)
    trainer = Trainer(config, folder, own, fabric, spec, loop)
    try:
        checks.fits(trainer)
    except BaseException:
        trainer.close()
        raise
    return trainer


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to end after this round; a second Ctrl-C ends it at once."""

    def ask(number: int, frame: Any) -> None:
        if trainer.asked and number == signal.SIGINT:
            raise KeyboardInterrupt(number)
        if not trainer.asked and trainer.fabric.is_global_zero:
            os.write(2, STOPPING)  # print may be what was interrupted
        trainer.asked = number

    with handling(ask):
        yield

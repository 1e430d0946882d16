"""Drive a built run from its first hook to its last, whatever happens to it."""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.reading import checkpoints
from rlplug.distributed.fabric import explain_collective
from rlplug.distributed.keepalive import watch_ranks
from rlplug.distributed.signals import handle_signals
from rlplug.distributed.torch_setup import denormals_flushed
from rlplug.evaluation.evaluator import Stopped
from rlplug.run import run_dir
from rlplug.run.state import callbacks_of
from rlplug.trainer.trainer import Trainer
from rlplug.types import RunError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR)
"""errors of the disk, or of what somebody put there"""
STOPPING = b"\nrlplug: stopping after this round, with a checkpoint; Ctrl-C again: at once, without one\n"


def drive(trainer: Trainer) -> float:
    """Run the loop to its end, evaluate, and write a checkpoint of where that was.

    Returns:
        The mean return of the final evaluation.

    Raises:
        RunError: it could not go on.
        KeyboardInterrupt: it was stopped; holds the signal.
    """
    callbacks, status = callbacks_of(trainer), "failed"
    manager = callbacks.open(trainer)
    try:
        with disk_errors(trainer.run_dir), _stop_on_signal(trainer), denormals_flushed(), _end_without_machine(trainer):
            trainer.hooks.hook.rlplug_started(run=trainer)
            trainer.clock.started_up()
            with suppress(Stopped):
                trainer.loop.run(trainer)
            callbacks.finish(trainer)
            if trainer.resolved.plan.actors is not None:
                _close_in_turn(trainer)
        if trainer.agreed_stop:
            raise KeyboardInterrupt(trainer.agreed_stop)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except RunError as error:
        raise RunError(_way_back(error, manager)) from error.__cause__
    except Exception as error:
        if (reason := explain_collective(error)) is not None:
            raise RunError(_way_back(reason, manager)) from None
        error.add_note(_way_back("", manager))
        raise
    finally:
        if trainer.ctx.rank == 0:
            _end(trainer, manager, status)
    return callbacks.evaluation.latest.get("eval/return_mean", math.nan)


def _close_in_turn(trainer: Trainer) -> None:
    """Let the other ranks leave the Ray cluster before the first one, which may have started it, stops it."""
    if trainer.ctx.rank != 0:
        trainer.close()
    trainer.learner.collectives.exchange(None)


def _end(trainer: Trainer, manager: CheckpointManager, status: str) -> None:
    """Write ``summary.json``, and end the loggers."""
    evaluation, progress = callbacks_of(trainer).evaluation, trainer.progress
    wall, startup = trainer.clock.wall(), trainer.clock.startup_s
    summary = {
        "status": status,
        **evaluation.latest,
        "eval/env_steps": evaluation.latest_at,
        "env_steps": progress.env_steps,
        "updates": progress.updates,
        "episodes": progress.episodes,
        "wall_s": round(wall, 3),
        "env_steps_per_s": round(progress.env_steps / (wall - startup), 1),
        "startup_s": round(startup, 3),
        "checkpoint": manager.last and manager.last.name,
    }
    try:
        try:
            run_dir.write_json(trainer.run_dir / run_dir.SUMMARY, summary)
        finally:
            trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
    except OSError as error:
        if status == "finished":  # otherwise the error that ended the run matters more
            raise RunError(_way_back(f"{trainer.run_dir}: {error.strerror}", manager)) from None


def _stop_on_signal(trainer: Trainer) -> AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM ask the run to end after this round, and a second Ctrl-C end it at once."""

    def request(number: int, frame: Any) -> None:
        if trainer.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt(number)
        if not trainer.stop_signal and trainer.ctx.rank == 0:
            os.write(2, STOPPING)  # print may be what was interrupted
        trainer.request_stop(number)

    return handle_signals(request)


def _end_without_machine(trainer: Trainer) -> AbstractContextManager[None]:
    """On several machines, end the run when one is lost."""
    if trainer.resolved.plan.num_nodes == 1:
        return nullcontext()
    fabric = trainer.learner.fabric

    def end(reason: str) -> None:
        if fabric.local_rank == 0:
            message = with_way_back(RunError(reason), trainer.run_dir, next(iter(checkpoints(trainer.run_dir)), None))
            os.write(2, f"rlplug: {message}\n".encode())
        os._exit(1)  # the main thread may be waiting in a collective

    return watch_ranks(fabric, end)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or broken disk into one message: it is no bug."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(f"{error.filename or folder}: {error.strerror}") from None


def _way_back(error: object, manager: CheckpointManager) -> str:
    """Wait for a checkpoint that is being written, and return ``with_way_back``."""
    with suppress(RunError):
        manager.wait()
    # the managers of other ranks than the first do not know
    return with_way_back(error, manager.run, manager.last or next(iter(checkpoints(manager.run)), None))


def with_way_back(error: object, folder: Path, last: Path | None) -> str:
    """Return an error, of one line or several, and below it how to go on from checkpoint ``last``."""
    said = str(error)
    between = "\n" if "\n" in said else "; " if said else ""
    good = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}"
    return f"{said}{between}{good}; continue with: python -m rlplug resume {folder}"

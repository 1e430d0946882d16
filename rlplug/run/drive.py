"""Drive a built run from its first hook to its last, whatever happens to it."""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rlplug.checkpointing.reading import checkpoints
from rlplug.distributed.signals import handling
from rlplug.distributed.spawn import RankError
from rlplug.distributed.torch_setup import denormals_flushed
from rlplug.distributed.wires import listening
from rlplug.evaluation.evaluator import Stopped
from rlplug.run import run_dir
from rlplug.run.callbacks import Callbacks
from rlplug.trainer.trainer import Trainer
from rlplug.types import RunError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR)
"""errors of the disk, or of what somebody put there"""
STOPPING = b"\nrlplug: stopping after this round, with a checkpoint; Ctrl-C again: at once, without one\n"


def drive(trainer: Trainer, loggers: Sequence[Any]) -> float:
    """Run the loop to its end, evaluate, and write a checkpoint of where that was.

    Returns:
        The mean return of the final evaluation.

    Raises:
        RunError: it could not go on.
        KeyboardInterrupt: it was stopped; holds the signal.
    """
    callbacks: Callbacks = trainer.reports  # type: ignore[assignment]
    for logger in loggers:
        trainer.hooks.register(logger)
    trainer.hooks.check_pending()
    callbacks.open(trainer)
    status = "failed"
    try:
        with disk_errors(trainer.run_dir), _stop_on_signal(trainer), denormals_flushed(), _machines_heard(trainer):
            trainer.hooks.hook.rlplug_started(run=trainer)
            trainer.clock.started_up()
            with suppress(Stopped):
                trainer.loop.run(trainer)
            callbacks.finish(trainer)
        if trainer.agreed_stop:
            raise KeyboardInterrupt(trainer.agreed_stop)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except RunError as error:
        raise RunError(with_way_back(error, trainer.run_dir, _last(callbacks))) from error.__cause__
    except Exception as error:
        error.add_note(_way_back(trainer.run_dir, _last(callbacks)))
        raise
    finally:
        _end(trainer, callbacks, status)
    return callbacks.evaluation.latest.get("eval/return_mean", math.nan)


def _end(trainer: Trainer, callbacks: Callbacks, status: str) -> None:
    if trainer.ctx.rank != 0:
        return
    summary = _summary(trainer, callbacks, status)
    try:
        try:
            run_dir.write_json(trainer.run_dir / run_dir.SUMMARY, summary)
        finally:
            trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
    except OSError as error:
        if status == "finished":
            way_back = _way_back(trainer.run_dir, _last(callbacks))
            raise RunError(f"{trainer.run_dir}: {error.strerror}; {way_back}") from None


def _summary(trainer: Trainer, callbacks: Callbacks, status: str) -> Mapping[str, Any]:
    """Return what ``summary.json`` holds."""
    last = callbacks.manager.last if callbacks.manager is not None else None
    progress, wall, startup = trainer.progress, trainer.clock.wall(), trainer.clock.startup_s
    return {
        "status": status,
        **callbacks.evaluation.latest,
        "eval/env_steps": callbacks.evaluation.latest_at,
        "env_steps": progress.env_steps,
        "updates": progress.updates,
        "episodes": progress.episodes,
        "wall_s": round(wall, 3),
        "env_steps_per_s": round(progress.env_steps / (wall - startup), 1),
        "startup_s": round(startup, 3),
        "checkpoint": last and last.name,
    }


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to end after this round; a second Ctrl-C ends it at once."""

    def request(number: int, frame: Any) -> None:
        if trainer.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt(number)
        if not trainer.stop_signal and trainer.ctx.rank == 0:
            os.write(2, STOPPING)  # print may be what was interrupted
        trainer.request_stop(number)

    with handling(request):
        yield


def _machines_heard(trainer: Trainer) -> AbstractContextManager[None]:
    """Where there are several machines, end the run once one is gone."""
    if trainer.resolved.plan.num_nodes == 1:
        return nullcontext()
    fabric = trainer.learner.fabric

    def end(what: str) -> None:
        if fabric.local_rank == 0:
            said = with_way_back(RankError(what), trainer.run_dir, next(iter(checkpoints(trainer.run_dir)), None))
            os.write(2, f"rlplug: {said}\n".encode())
        os._exit(1)  # the main thread may wait inside of a collective

    return listening(fabric, end)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or broken disk into one message: it is no bug."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(f"{error.filename or folder}: {error.strerror}") from None


def _last(callbacks: Callbacks) -> Path | None:
    """Return the newest checkpoint, once nothing is being written."""
    assert callbacks.manager is not None
    with suppress(RunError):
        callbacks.manager.wait()
    return callbacks.manager.last


def with_way_back(error: RunError, folder: Path, last: Path | None) -> str:
    """Return an error, of one line or several, and below it how to go on."""
    said = str(error)
    return said + ("\n" if "\n" in said else "; ") + _way_back(folder, last)


def _way_back(folder: Path, last: Path | None) -> str:
    good = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}"
    return f"{good}; continue with: python -m rlplug resume {folder}"

"""Loggers of a run. A logger that fails is dropped, and the run continues."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, RunError

# errors of the disk or of existing files
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR)


class AtOnce(KeyboardInterrupt):
    """A second Ctrl-C, which ends the run before the end of the round."""


def register(trainer: Trainer) -> None:
    """Register the configured loggers, on rank 0, and callbacks for events."""
    hooks, chosen = trainer.hooks, trainer.config.logger if trainer.ctx.rank == 0 else {}
    every = [(key, one.build(trainer.ctx)) for key, one in chosen.items()]
    for _, logger in every:
        hooks.register(logger)
    for key, logger in (*every, *(("", one) for one in trainer.reports.user.register(hooks))):
        for event in hooks.get_hookcallers(logger) or ():
            for impl in event.get_hookimpls():
                if impl.plugin is logger and not (impl.wrapper or impl.hookwrapper):
                    guarded = _guarded(impl.function, event.name, key, logger, trainer)
                    impl.function = guarded  # type: ignore[misc]


def _guarded(function: Callable[..., Any], event: str, key: str, logger: Any, trainer: Trainer) -> Callable[..., Any]:
    """Wrap ``function`` to drop its logger with one line when it fails. A callback, without ``key``, ends the run.

    ``KeyboardInterrupt`` or ``RunError`` from a logger ends the run after the round, with a checkpoint, as Ctrl-C does.
    A second Ctrl-C or a full disk ends it immediately.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (KeyboardInterrupt, RunError) as error:
            if isinstance(error, AtOnce) or event == "rlplug_ended":
                raise
            first = error if isinstance(error, RunError) else None
            trainer.agreement.request_stop(trainer.agreement.asked or signal.SIGINT, first)
        except ConfigError:
            raise
        except Exception as error:
            if not key or (isinstance(error, OSError) and error.errno in DISK):
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            said = f"failed in {event} at step {trainer.steps:,}, and is disabled: {what}"
            print(f"rlplug: logger.{key} {said} ({at.filename}:{at.lineno})", file=sys.stderr, flush=True)
            trainer.hooks.unregister(logger)

    return call

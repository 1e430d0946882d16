"""Time limits of checks, and protection against scripts that child processes run again."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path
from types import FrameType

LIMIT_S = 300.0
"""default time limit of a check in seconds"""
UNGUARDED = (
    'checks start processes, and these import your script: call checks under `if __name__ == "__main__":`, or in a test'
)
IMPORTED = 97
"""exit code of a child process that runs such a script"""
OURS = str(Path(__file__).parents[1])


class _Alarm(BaseException):
    """Interrupts a check; not an ``Exception``, which the check might handle."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` after a time limit; its message and cause name the line in progress.

    An alarm interrupts Python code and blocking calls; C code is interrupted when it returns. There is no limit outside
    the main thread, or if another alarm is already set.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "SIGALRM") or 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds:
        yield
        return
    start = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Alarm(f"it did not finish within {seconds:g} s, in {where(frame)}; raise limit_s to allow more")

    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Alarm as alarm:
        error = TimeoutError(*alarm.args)
        error.__notes__ = [*getattr(alarm, "__notes__", ())]
        raise error from alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(left - time.monotonic() + start, 1e-3) if left else 0.0)
        signal.signal(signal.SIGALRM, handler)


def where(frame: FrameType | None) -> str:
    """Return the innermost line of a plugin, else of rlplug: ``x.py:7 (act)``."""
    stack = [(f.filename, f.lineno, f.name) for f in reversed(traceback.extract_stack(frame))]
    installed = ("site-packages", "dist-packages", sys.base_prefix, "<")
    theirs = [place for place in stack if not any(word in place[0] for word in installed)]
    other = [place for place in theirs if not place[0].startswith(f"{OURS}/testing")]
    file, line, name = (other or theirs or stack)[0]
    return f"{file}:{line} ({name})"


def refuse_import() -> None:
    """End a child process that runs a script because it imports it, with an error message.

    Raises:
        SystemExit: with ``IMPORTED``.
    """
    if getattr(current_process(), "_inheriting", False):
        print(f"rlplug: {UNGUARDED}", file=sys.stderr)
        raise SystemExit(IMPORTED)

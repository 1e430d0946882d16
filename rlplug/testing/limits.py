"""What stops a check that would never end: a time limit, and scripts that the processes of a check run again."""

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
"""seconds that a check may take"""
UNGUARDED = (
    'checks start processes, and these import your script: call checks under `if __name__ == "__main__":`, or in a test'
)
IMPORTED = 97
"""exit code of a process that was not to run such a script"""
OURS = str(Path(__file__).parents[1])


class _Alarm(BaseException):
    """No ``Exception``, which what is interrupted might handle, and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` for what takes longer; its message, and the traceback of its cause, say where it was.

    An alarm does it, which interrupts Python code, and calls that wait; C code that computes is interrupted when it
    returns. There is no limit in other threads than the main one, and none where an earlier alarm is set.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "SIGALRM") or 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds:
        yield
        return
    start = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Alarm(f"it was not done after {seconds:g} s, in {where(frame)}; a longer limit_s allows for more")

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
    """Name the innermost line that is a plugin author's, or else rlplug's own: ``x.py:7 (act)``."""
    stack = [(f.filename, f.lineno, f.name) for f in reversed(traceback.extract_stack(frame))]
    installed = ("site-packages", "dist-packages", sys.base_prefix, "<")
    theirs = [place for place in stack if not any(word in place[0] for word in installed)]
    other = [place for place in theirs if not place[0].startswith(f"{OURS}/testing")]
    file, line, name = (other or theirs or stack)[0]
    return f"{file}:{line} ({name})"


def refuse_import() -> None:
    """End a process that runs a script only because it has to import it, and say why.

    Raises:
        SystemExit: with ``IMPORTED``.
    """
    if getattr(current_process(), "_inheriting", False):
        print(f"rlplug: {UNGUARDED}", file=sys.stderr)
        raise SystemExit(IMPORTED)

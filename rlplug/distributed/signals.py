"""Handlers of Ctrl-C and SIGTERM, for a while."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def masking(how: int) -> Iterator[None]:
    """Block or unblock Ctrl-C and SIGTERM for a while."""
    before = signal.pthread_sigmask(how, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handling(handler: Any, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``handler``; outside of the main thread signals are somebody else's."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, then in before.items():
            signal.signal(number, then)

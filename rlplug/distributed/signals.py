"""Temporary handlers of Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def mask_signals(how: int) -> Iterator[None]:
    """Block (``SIG_BLOCK``) or unblock (``SIG_UNBLOCK``) Ctrl-C and SIGTERM in this thread."""
    before = signal.pthread_sigmask(how, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handle_signals(handler: Any, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM with ``handler``; do nothing outside the main thread, where Python forbids it."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

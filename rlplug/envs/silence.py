"""Detect environments that do not return: print a line, and let one Ctrl-C end the run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlplug.api import VecEnv

T = TypeVar("T")
LOOK_EVERY = 0.5  # seconds


class _Call:
    """The environment call in progress: one thread steps environments."""

    began: float | None = None
    limit_s = 0.0
    env_ids: Sequence[int] = ()
    told = False


_call = _Call()
_watching = threading.Event()


def watched(env: VecEnv, function: Callable[..., T], env_ids: Sequence[int]) -> Callable[..., T]:
    """Return a method of ``env`` that prints a line if it takes longer than ``env.traits.timeout_s``."""
    limit = env.traits.timeout_s
    if limit is None:
        return function

    def call(*args: Any) -> T:
        _call.limit_s, _call.env_ids, _call.told, _call.began = limit, env_ids, False, time.monotonic()
        try:
            return function(*args)
        finally:
            _call.began = None

    if not _watching.is_set():
        _watching.set()
        threading.Thread(target=_watch, daemon=True).start()
    return call


def is_silent() -> bool:
    """Return whether an environment call of this process exceeds its timeout."""
    return _call.began is not None and _call.told


def _watch() -> None:
    while True:
        time.sleep(LOOK_EVERY)
        began = _call.began
        if began is not None and not _call.told and time.monotonic() - began > _call.limit_s:
            _call.told = True
            first, last = _call.env_ids[0], _call.env_ids[-1]
            who = f"environment {first} has" if first == last else f"environments {first} to {last} have"
            said = f"{who} not answered for {_call.limit_s:g} s (env.timeout_s); Ctrl-C ends the run at once"
            os.write(2, f"rlplug: {said}\n".encode())

"""Measure the memory of an object."""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from rlplug.context import RunContext


def addresses(root: Any) -> dict[int, int]:
    """Return the bytes of every memory block of an object's own tensors and arrays, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def visit(thing: Any) -> None:
        if id(thing) in seen or isinstance(thing, RunContext | ModuleType | type):
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.ndim:  # 0-d tensors are schedules, which belong to the run
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            base = thing if thing.base is None or not isinstance(thing.base, np.ndarray) else thing.base
            found[base.ctypes.data] = base.nbytes
        elif isinstance(thing, dict):
            for value in thing.values():
                visit(value)
        elif isinstance(thing, list | tuple | set | deque):
            for value in thing:
                visit(value)
        elif hasattr(thing, "__dict__"):
            visit(vars(thing))

    visit(root)
    return found

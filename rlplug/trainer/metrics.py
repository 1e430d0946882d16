"""Metrics of a run, kept on the device until they are logged."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlplug.tree import what
from rlplug.types import Tree


class Clock:
    """Wall-clock seconds, in total and by phase; a resumed run continues from ``before``."""

    def __init__(self) -> None:
        self.started, self.before, self.startup_s = time.perf_counter(), 0.0, 0.0
        self.spent: dict[str, float] = defaultdict(float)

    def wall(self) -> float:
        return self.before + time.perf_counter() - self.started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] += time.perf_counter() - start

    def load(self, before: float, spent: Mapping[str, float]) -> None:
        self.before = before
        self.spent.update(spent)


class Means:
    """Means of 0-d tensors over an interval. Adding does not synchronize with an accelerator.

    On the host, values are kept as numbers: small long-lived tensors between large short-lived ones fragment the
    allocator's memory, by hundreds of megabytes with SAC.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor], finite: bool = False) -> None:
        """Add one value of each. ``finite`` skips values that are NaN or infinite, and synchronizes."""
        for name, value in values.items():
            if not finite or value.isfinite():
                self._values[name].append(value.item() if value.is_cpu else value)

    def drain(self) -> dict[str, float]:
        drained = {name: float(values.float().mean()) for name, values in self.state().items()}
        self._values.clear()
        return drained

    def state(self) -> Tree:
        """Return the values of every mean, ``[n]``."""
        found = dict[str, Tensor]()
        for name, seen in self._values.items():
            device = next((x.device for x in seen if isinstance(x, Tensor)), None)  # numbers may follow tensors
            several = [torch.as_tensor(x, device=device) for x in seen] if device else []
            found[name] = torch.stack(several) if several else torch.tensor(seen)
        return found

    def load(self, state: Tree) -> None:
        """Replace all values. Raises AttributeError or ValueError if they are not ``[n]`` for each name."""
        for name, values in state.items():
            if values.ndim != 1:
                raise ValueError(f"the values of {name} should have the shape [n], and are {what(values)}")
        kept = {name: values.tolist() if values.is_cpu else list(values.unbind()) for name, values in state.items()}
        self._values = defaultdict(list, kept)

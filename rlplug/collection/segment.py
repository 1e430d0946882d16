"""Rows of a stream in memory: written by numpy, read as tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.types import Batch


class Rows:
    """Preallocated rows ``[T+1, B]``: numpy views to write, tensors to read, one memory."""

    def __init__(self) -> None:
        self.tensors: Batch = {}
        self.arrays: Batch = {}

    def allocate(self, like: Mapping[str, Any], length: int) -> None:
        """Make room for what ``like`` (leaves ``[B, ...]``) has and is not there yet."""
        for key, leaf in like.items():
            if isinstance(leaf, Mapping):
                inner = Rows()
                inner.tensors, inner.arrays = self.tensors.setdefault(key, {}), self.arrays.setdefault(key, {})
                inner.allocate(leaf, length)
            elif key not in self.arrays:
                self.arrays[key] = np.zeros((length, *leaf.shape), leaf.dtype)
                with torch.inference_mode(False):  # what is allocated while acting is learnt from later
                    self.tensors[key] = torch.from_numpy(self.arrays[key])


def put(rows: Batch, t: Any, values: Mapping[str, Any]) -> None:
    """Write ``values`` into row ``t`` (or into rows ``(t[i], i)``, when ``t`` is a pair of index arrays)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            put(rows[key], t, value)
        else:
            rows[key][t] = value


def take(rows: Batch, t: Any) -> Batch:
    """Row ``t`` (or rows ``(t[i], i)``) of every leaf."""
    return {key: take(leaf, t) if isinstance(leaf, dict) else leaf[t] for key, leaf in rows.items()}


def row_of(leaf: Any, t: Any) -> Any:
    """Row ``t`` of one leaf."""
    return take(leaf, t) if isinstance(leaf, dict) else leaf[t]


def put_at(leaf: Any, at: Any, columns: Any, values: Any) -> None:
    """Write the columns ``columns`` of ``values [B, ...]`` into rows ``at``."""
    if isinstance(leaf, dict):
        for key, inner in leaf.items():
            put_at(inner, at, columns, values[key])
    else:
        leaf[at, columns] = values[columns]


def pad(leaf: Any, start: int, stop: int, column: int) -> None:
    """Repeat row ``start`` up to row ``stop`` in one column."""
    if isinstance(leaf, dict):
        for inner in leaf.values():
            pad(inner, start, stop, column)
    else:
        leaf[start + 1 : stop + 1, column] = leaf[start, column]


def only(batch: Batch, keys: Container[str]) -> Batch:
    """The leaves of ``batch`` that are among ``keys``."""
    return {key: leaf for key, leaf in batch.items() if key in keys}


def on_host(batch: Batch) -> Batch:
    """Tensors as arrays."""
    return tree.map(lambda x: x.cpu().numpy(), batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Arrays or tensors as tensors on ``device``."""
    return tree.map(lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


def copied(batch: Batch) -> Batch:
    """Arrays that share no memory with those of ``batch``."""
    return tree.map(np.copy, batch)

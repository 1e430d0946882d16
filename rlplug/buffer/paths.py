"""Leaves of a batch by path, and rows in a ring."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch

Path = tuple[str, ...]


def leaf_at(batch: Batch, path: Path) -> Any:
    return reduce(lambda inner, key: inner[key], path, batch)


def set_leaf(batch: Batch, path: Path, leaf: Any) -> None:
    reduce(lambda inner, key: inner.setdefault(key, {}), path[:-1], batch)[path[-1]] = leaf


def without(batch: Batch, path: Path) -> Batch:
    """Return a copy without one leaf."""
    key, *inner = path
    if inner:
        return batch | {key: without(batch[key], tuple(inner))}
    return {name: leaf for name, leaf in batch.items() if name != key}


def as_stored(row: Tensor, stored: Any) -> Any:
    """Return a row as an array, or on the storage's device, without synchronizing; its memory may be reused."""
    if not isinstance(stored, Tensor):
        return row.numpy()
    return (row.clone() if row.is_pinned() else row).to(stored.device, non_blocking=True)


def put_rows(storage: Batch, rows: Batch, at: int, length: int, size: int) -> None:
    """Write ``length`` rows from place ``at`` on, wrapping around at the end of the ring."""
    if at + length <= size:
        tree.put(storage, slice(at, at + length), rows)
    else:
        tree.put(storage, slice(at, size), tree.take(rows, slice(size - at)))
        tree.put(storage, slice(at + length - size), tree.take(rows, slice(size - at, None)))


def put_last(kept: Tensor, places: Any, new: Tensor) -> None:
    """Write ``new [k, n, ...]`` to places ``[k, n]`` of the flattened ``kept [R, B, ...]``; the last of equal ones."""
    places, last = np.unique(places.reshape(-1)[::-1], return_index=True)
    last = torch.from_numpy(new.shape[0] * new.shape[1] - 1 - last)
    new = new.detach().flatten(0, 1)
    new = new[last.to(new.device)].to(kept.device, kept.dtype)
    kept.flatten(0, 1).index_copy_(0, torch.from_numpy(places).to(kept.device), new)

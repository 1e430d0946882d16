"""The preallocated memory of a segment: written by NumPy, or on a device by torch, and read as tensors."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch


class SegmentMemory:
    """Zeros ``[length, B, ...]`` for leaves ``[B, ...]``: ``arrays`` to write and ``tensors`` to read share them.

    Where the leaves are tensors, so are the ``arrays``, on the same device.
    """

    def __init__(self, like: Batch, length: int) -> None:
        with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
            self.arrays: Batch = tree.map(lambda x: _zeros(x, length), like)
            self.tensors: Batch = tree.map(torch.as_tensor, self.arrays)
        self.rows: list[Batch] = []
        """what the policy sees of each row, as views, for a collector that keeps them"""


def _zeros(x: Any, length: int) -> Any:
    if isinstance(x, Tensor):
        return torch.zeros(length, *x.shape, dtype=x.dtype, device=x.device)
    return np.zeros((length, *x.shape), x.dtype)


def only(batch: Batch, keys: Container[str], nested: Collection[str] = ()) -> Batch:
    """Return the entries of ``batch`` whose keys are among ``keys``, and those of its groups ``nested``."""
    kept = {key: leaf for key, leaf in batch.items() if key in keys or key in nested}
    return kept | {name: only(batch[name], keys) for name in nested}


def merged(batch: Batch, more: Batch) -> Batch:
    """Return ``batch`` with the entries of ``more``, and those of dicts that both have."""
    both = {key: merged(batch[key], leaf) for key, leaf in more.items() if isinstance(batch.get(key), dict)}
    return batch | more | both


def on_host(batch: Batch) -> Batch:
    """Return tensors as arrays."""
    return tree.map(lambda x: x.cpu().numpy(), batch)


def on_cpu(segment: Batch) -> Batch:
    """Return a segment whose tensors are on the host: mostly as it is."""
    return segment if segment["valid"].is_cpu else tree.map(Tensor.cpu, segment)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return arrays or tensors as tensors on ``device``."""
    return tree.map(lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


def copied(batch: Batch) -> Batch:
    """Return arrays, or tensors, that share no memory with those of ``batch``."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else np.copy(x), batch)

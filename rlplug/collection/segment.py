"""The preallocated memory of a segment: written by numpy, read as tensors."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import torch

from rlplug import tree
from rlplug.types import Batch


class SegmentMemory:
    """Zeros ``[length, B, ...]`` for leaves ``[B, ...]``: ``arrays`` to write and ``tensors`` to read share them."""

    def __init__(self, like: Batch, length: int) -> None:
        self.arrays: Batch = tree.map(lambda x: np.zeros((length, *x.shape), x.dtype), like)
        with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
            self.tensors: Batch = tree.map(torch.from_numpy, self.arrays)


def only(batch: Batch, keys: Container[str]) -> Batch:
    """Return the entries of ``batch`` whose keys are among ``keys``."""
    return {key: leaf for key, leaf in batch.items() if key in keys}


def on_host(batch: Batch) -> Batch:
    """Return tensors as arrays."""
    return tree.map(lambda x: x.cpu().numpy(), batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return arrays or tensors as tensors on ``device``."""
    return tree.map(lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


def copied(batch: Batch) -> Batch:
    """Return arrays that share no memory with those of ``batch``."""
    return tree.map(np.copy, batch)

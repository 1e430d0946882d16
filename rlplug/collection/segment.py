"""The preallocated memory of a segment: written by numpy, read as tensors."""

from __future__ import annotations

from collections.abc import Collection, Container

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch, groups_of


class SegmentMemory:
    """Zeros ``[length, B, ...]`` for leaves ``[B, ...]``: ``arrays`` to write and ``tensors`` to read share them."""

    def __init__(self, like: Batch, length: int) -> None:
        self.arrays: Batch = tree.map(lambda x: np.zeros((length, *x.shape), x.dtype), like)
        with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
            self.tensors: Batch = tree.map(torch.from_numpy, self.arrays)


def only(batch: Batch, keys: Container[str], nested: Collection[str] = ()) -> Batch:
    """Return the entries of ``batch`` whose keys are among ``keys``, and those of its groups ``nested``."""
    kept = {key: leaf for key, leaf in batch.items() if key in keys or key in nested}
    return kept | {name: only(batch[name], keys) for name in nested}


def merged(batch: Batch, more: Batch) -> Batch:
    """Return ``batch`` with the entries of ``more``, and those of dicts that both have."""
    both = {key: merged(batch[key], leaf) for key, leaf in more.items() if isinstance(batch.get(key), dict)}
    return batch | more | both


def ended(batch: Batch) -> Tensor:
    """Return which transitions ``[T, B]`` end the episode of their column: behind them, no agent is alive."""
    acted, groups = batch["valid"][:-1], groups_of(batch).values()
    if "alive" not in next(iter(groups)):
        return acted & (batch["terminated"] | batch["truncated"])[:-1]
    going = [part["alive"][1:].reshape(*acted.shape, -1).any(2) for part in groups]
    return acted & ~torch.stack(going).any(0)


def on_host(batch: Batch) -> Batch:
    """Return tensors as arrays."""
    return tree.map(lambda x: x.cpu().numpy(), batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return arrays or tensors as tensors on ``device``."""
    return tree.map(lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


def copied(batch: Batch) -> Batch:
    """Return arrays that share no memory with those of ``batch``."""
    return tree.map(np.copy, batch)

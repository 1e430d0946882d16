"""The preallocated memory of a segment: written by numpy, read as tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.types import Batch


def nothing(*_: Any) -> None:
    """Write nothing."""


class SegmentMemory:
    """Rows ``[T+1, B]``: arrays to write and tensors to read, which share their memory.

    The writers write one part of a row each. They are chosen when memory is allocated: the writer of a part that the
    algorithm does not need is ``nothing``. An ``index`` is a row, a slice of rows, or a pair of rows ``[B]`` and
    environments ``[B]``.
    """

    def __init__(self) -> None:
        self.tensors: Batch = {}
        self.arrays: Batch = {}
        self.write_carry: Callable[[Any], None] = nothing
        """``(index)``: the recurrent state before the row"""
        self.write_output: Callable[[Any, Batch], None] = nothing
        """``(index, out)``: what the algorithm returned when it acted on the row"""
        self.write_previous: Callable[[Any, Any], None] = nothing
        """``(index, following)``: the action and the reward of the row, into the row that follows"""
        self.write_value: Callable[..., None] = nothing
        """``(index, mode, where=None)``: what the algorithm returns for a row on which it does not act"""

    def allocate(self, like: Mapping[str, Any], length: int) -> None:
        """Allocate ``length`` rows for those keys of ``like``, leaves ``[B, ...]``, that have no memory yet."""
        for key, leaf in like.items():
            if key not in self.arrays:
                self.arrays[key] = tree.map(lambda x: np.zeros((length, *x.shape), x.dtype), leaf)
                with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
                    self.tensors[key] = tree.map(torch.from_numpy, self.arrays[key])


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

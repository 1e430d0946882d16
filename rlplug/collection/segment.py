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

    Args:
        pin: allocate what lies on the host in pinned memory, from which a CUDA device copies without waiting.
    """

    def __init__(self, like: Batch, length: int, pin: bool = False) -> None:
        with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
            self.arrays: Batch = tree.map(lambda x: _zeros(x, length, pin), like)
            self.tensors: Batch = tree.map(torch.as_tensor, self.arrays)
        self.rows: list[Batch] = []
        """what the policy sees of each row, as views, for a collector that keeps them"""


def _zeros(x: Any, length: int, pin: bool) -> Any:
    if isinstance(x, Tensor):
        return torch.zeros(length, *x.shape, dtype=x.dtype, device=x.device)
    if pin and torch.cuda.is_available():
        return torch.zeros(length, *x.shape, dtype=torch.as_tensor(x[:1]).dtype).pin_memory().numpy()
    return np.zeros((length, *x.shape), x.dtype)


class OneCopy:
    """Brings dicts of tensors of the same shapes to the host as arrays, in one copy that is waited for once.

    The arrays share one memory, which the next ``arrays`` writes again.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._known: tuple[list[Any], Tensor, Batch] | None = None  # a layout, its memory on the host, and its arrays

    def packed(self, batch: Batch) -> Tensor:
        """Return the bytes of all leaves on their device, ``[n]``."""
        leaves = sorted(tree.items(batch), key=lambda item: -item[1].itemsize)  # so that each is aligned
        self._layout = [(path, x.dtype, x.shape, x.nbytes) for path, x in leaves]
        return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for _, x in leaves])

    def arrays(self, packed: Tensor) -> Batch:
        """Return what was packed last, as arrays."""
        if self._known is None or self._known[0] != self._layout:
            host, batch = torch.empty(len(packed), dtype=torch.uint8, pin_memory=packed.is_cuda), dict[str, Any]()
            pieces = host.split([n for *_, n in self._layout])
            for ((*outer, name), dtype, shape, _), piece in zip(self._layout, pieces, strict=True):
                part = batch
                for key in outer:
                    part = part.setdefault(key, {})
                part[name] = piece.view(dtype).view(shape).numpy()
            self._known = self._layout, host, batch
        self._known[1].copy_(packed)
        return self._known[2]


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


def as_it_is(x: Any) -> Any:
    return x


def to_array(x: Any) -> Any:
    """Return a tensor of a device, or what has been brought to the host, as an array."""
    return x.cpu().numpy() if isinstance(x, Tensor) else x

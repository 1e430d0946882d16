"""Data between the host and a device: arrays and tensors, and what the host may look at while a device computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from rlplug import tree
from rlplug.types import Batch, Tree


def reads_freely(x: Tensor) -> bool:
    """Return whether reading ``x [...]`` costs the host nothing: it does not wait for a device, and traces nothing.

    A function that takes a shortcut after such a look also serves where it is compiled or recorded.
    """
    return x.is_cpu and not is_compiling()


def on_host(batch: Batch) -> Batch:
    """Return tensors as arrays."""
    return tree.map(lambda x: x.cpu().numpy(), batch)


def on_cpu(segment: Batch) -> Batch:
    """Return a segment with its tensors on the host; no copy if they already are."""
    return segment if segment["valid"].is_cpu else tree.map(Tensor.cpu, segment)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return arrays or tensors as tensors on ``device``."""
    return tree.map(lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


def copied(batch: Batch) -> Batch:
    """Return a deep copy of arrays or tensors."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else np.copy(x), batch)


def to_array(x: Any) -> Any:
    """Return a tensor or an array as an array on the host."""
    return x.cpu().numpy() if isinstance(x, Tensor) else x


class OneCopy:
    """Copies dicts of tensors to the host as arrays, in one copy with one synchronization.

    The arrays share memory that the next ``arrays`` overwrites.
    """

    def __init__(self) -> None:
        self._kinds: Tree = None  # dtype and shape of every leaf
        self._known: tuple[Tree, Tensor, Batch] | None = None  # kinds, host memory, and its arrays

    def packed(self, batch: Batch) -> Tensor:
        """Return the bytes of all leaves on their device, ``[n]``."""
        self._kinds = tree.map(lambda x: (x.dtype, x.shape), batch)
        return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in tree.leaves(batch)])

    def arrays(self, packed: Tensor) -> Batch:
        """Return the last packed tensors as arrays."""
        if self._known is None or self._known[0] != self._kinds:
            host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=packed.is_cuda)
            like = tree.map(lambda kind: torch.empty(kind[1], dtype=kind[0]).numpy(), self._kinds)
            pieces = iter(host.split([x.nbytes for x in tree.leaves(like)]))
            arrays = tree.map(lambda x: next(pieces).numpy().view(x.dtype).reshape(x.shape), like)
            self._known = self._kinds, host, arrays
        self._known[1].copy_(packed)
        return self._known[2]

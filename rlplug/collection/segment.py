"""Rows of a segment: their layout and their preallocated memory."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Needs
from rlplug.types import Batch, EnvSpec, Tree, groups_of

RESULT = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
CORE = RESULT | {"is_first": np.bool_, "valid": np.bool_}
BEGINS = "agent_is_first"
PREVIOUS = ("prev_action", "prev_reward", BEGINS)
"""keys that are derived from the previous row"""


class Layout(NamedTuple):
    """Layout of rows, as batches of one row, leaves ``[B, ...]``."""

    observed: Batch  # keys that the environments return
    previous: Batch  # needed keys of the previous row, as in the first row of an episode
    result: Batch  # results of a row without an action: zeros
    seen: Batch  # inputs of the policy

    @classmethod
    def of(cls, first: Batch, spec: EnvSpec, needs: Needs, n: int) -> Layout:
        """Return the layout of rows, given the result ``first`` of a reset of ``n`` environments."""
        previous, result = dict[str, Any](), dict[str, Any]()
        for name, part in groups_of(first).items():
            group = spec.groups[name or next(iter(spec.groups))]
            shape = part["alive"].shape if spec.has_agents else (n,)
            action = np.zeros((*shape, *(group.action.shape or ())), group.action.dtype)
            before = {"prev_action": action, "prev_reward": np.zeros(shape, np.float32)}
            before = only(before | ({BEGINS: part["alive"]} if spec.has_agents else {}), needs.keys)
            after = {key: np.zeros(shape, dtype) for key, dtype in RESULT.items()}
            previous |= {name: before} if name else before
            result |= {name: after} if name else after
        more = {"previous": previous, "result": result, "is_first": np.ones(n, np.bool_)}
        if isinstance(x := next(tree.leaves(first)), Tensor):  # keep rows on the environment's device
            more = on_device(more, x.device)
        seen = merged(first, more["previous"]) | {"is_first": more["is_first"]}
        return cls(first, more["previous"], more["result"], seen)


class SegmentMemory:
    """Memory of rows: zeros ``[length, B, ...]`` for leaves ``[B, ...]``, shared by ``arrays`` and ``tensors``.

    If the leaves are tensors, the ``arrays`` are tensors on the same device. An index is a row, a slice of rows, or
    (rows ``[B]``, environments ``[B]``).

    Args:
        seen: batch with the keys of the policy's inputs.
        pin: allocate host memory as pinned memory, which a CUDA device copies asynchronously.
    """

    def __init__(self, like: Batch, length: int, seen: Batch, pin: bool = False) -> None:
        on_device = isinstance(like["valid"], Tensor)
        with torch.inference_mode(False):  # allocated while acting, but used in training
            self.arrays: Batch = tree.map(lambda x: _zeros(x if on_device else to_array(x), length, pin), like)
            self.tensors: Batch = tree.map(torch.as_tensor, self.arrays)
        self.seen, inputs = chosen(seen, self.arrays), chosen(seen, self.tensors)
        self.rows: list[Batch] = [tree.take(inputs, t) for t in range(length)]
        """views of the policy's inputs, by row"""
        self._written = as_it_is if on_device else to_array
        self._parts = [part for part in groups_of(self.arrays).values() if {*PREVIOUS} & part.keys()]

    def write(self, index: Any, out: Batch, where: Any = None, arrays: Batch | None = None) -> None:
        """Write the stored keys of ``out``; only for the environments ``where [B]``, if given."""
        arrays = self.arrays if arrays is None else arrays
        for key, value in out.items():
            if key not in arrays:
                continue
            if isinstance(value, dict):
                self.write(index, value, where, arrays[key])
            else:
                value = self._written(value)
                arrays[key][index] = value if where is None else value[where]

    def write_previous(self, index: Any, following: Any) -> None:
        """Write action and reward of a row into the next row; see ``write_previous``."""
        for part in self._parts:
            write_previous(part, self.arrays["valid"], index, following)


def write_previous(part: Batch, valid: Any, index: Any, following: Any) -> None:
    """Write a group's action and reward of rows into ``PREVIOUS`` of the next rows: zeros after final rows."""
    acted = valid[index]
    if "alive" in part:
        acted = (acted.T & part["alive"][index].T).T
    if BEGINS in part:  # alive agents that did not act
        part[BEGINS][following] = part["alive"][following] & ~acted
    for key in ("prev_action", "prev_reward"):
        if key in part:
            values = part[key.removeprefix("prev_")][index]
            where = acted.reshape(*acted.shape, *(1 for _ in values.shape[acted.ndim :]))
            part[key][following] = (torch if isinstance(values, Tensor) else np).where(where, values, 0)


def _zeros(x: Any, length: int, pin: bool) -> Any:
    if isinstance(x, Tensor):
        return torch.zeros(length, *x.shape, dtype=x.dtype, device=x.device)
    if pin and torch.cuda.is_available():
        return torch.zeros(length, *x.shape, dtype=torch.as_tensor(x[:1]).dtype).pin_memory().numpy()
    return np.zeros((length, *x.shape), x.dtype)


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


def only(batch: Batch, keys: Container[str], nested: Collection[str] = ()) -> Batch:
    """Return the entries of ``batch`` with these ``keys``, also within its groups ``nested``."""
    kept = {key: leaf for key, leaf in batch.items() if key in keys or key in nested}
    return kept | {name: only(batch[name], keys) for name in nested}


def chosen(like: Batch, batch: Batch) -> Batch:
    """Return the leaves of ``batch`` that ``like`` has, too."""
    return tree.map(lambda _, x: x, like, batch)


def merged(batch: Batch, more: Batch) -> Batch:
    """Return ``batch`` with missing entries from ``more``, also in nested dicts."""
    both = {key: merged(batch[key], x) for key, x in more.items() if isinstance(x, dict) and key in batch}
    return batch | {key: x for key, x in more.items() if key not in batch} | both


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


def as_it_is(x: Any) -> Any:
    return x


def to_array(x: Any) -> Any:
    """Return a tensor or an array as an array on the host."""
    return x.cpu().numpy() if isinstance(x, Tensor) else x

"""The rows of a segment: what they consist of, and the preallocated memory that they are written into."""

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
"""keys that follow from the row before"""


class Layout(NamedTuple):
    """What rows consist of: batches of one row, leaves ``[B, ...]``."""

    observed: Batch  # what the environments return of every row
    previous: Batch  # what the first row of an episode has of the row before it, of the keys that are needed
    result: Batch  # what a row has on which no action is taken: zeros
    seen: Batch  # what the policy sees of it

    @classmethod
    def of(cls, first: Batch, spec: EnvSpec, needs: Needs, n: int) -> Layout:
        """Return the layout of rows of which ``n`` environments returned ``first`` at their reset."""
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
        if isinstance(x := next(tree.leaves(first)), Tensor):  # rows stay on the environment's device
            more = on_device(more, x.device)
        seen = merged(first, more["previous"]) | {"is_first": more["is_first"]}
        return cls(first, more["previous"], more["result"], seen)


class SegmentMemory:
    """Zeros ``[length, B, ...]`` for leaves ``[B, ...]``: ``arrays`` to write and ``tensors`` to read share them.

    Where the leaves are tensors, so are the ``arrays``, on the same device. An index is a row, a slice of rows, or
    (rows ``[B]``, environments ``[B]``).

    Args:
        seen: of its keys the policy sees the leaves.
        pin: allocate what lies on the host in pinned memory, from which a CUDA device copies without waiting.
    """

    def __init__(self, like: Batch, length: int, seen: Batch, pin: bool = False) -> None:
        on_device = isinstance(like["valid"], Tensor)
        with torch.inference_mode(False):  # the algorithm learns from memory that is allocated while it acts
            self.arrays: Batch = tree.map(lambda x: _zeros(x if on_device else to_array(x), length, pin), like)
            self.tensors: Batch = tree.map(torch.as_tensor, self.arrays)
        self.seen, inputs = chosen(seen, self.arrays), chosen(seen, self.tensors)
        self.rows: list[Batch] = [tree.take(inputs, t) for t in range(length)]
        """what the policy sees of each row, as views"""
        self._written = as_it_is if on_device else to_array
        self._parts = [part for part in groups_of(self.arrays).values() if {*PREVIOUS} & part.keys()]

    def write(self, index: Any, out: Batch, where: Any = None, arrays: Batch | None = None) -> None:
        """Write those keys of ``out`` that are kept; only of the environments ``where [B]``, if given."""
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
        """Write action and reward of a row into the one that follows, as ``write_previous``."""
        for part in self._parts:
            write_previous(part, self.arrays["valid"], index, following)


def write_previous(part: Batch, valid: Any, index: Any, following: Any) -> None:
    """Write action and reward of rows of a group into ``PREVIOUS`` of those that follow: zeros after a final one."""
    acted = valid[index]
    if "alive" in part:
        acted = (acted.T & part["alive"][index].T).T
    if BEGINS in part:  # who is alive and did not act
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
    """Brings dicts of tensors of the same shapes to the host as arrays, in one copy that is waited for once.

    The arrays share one memory, which the next ``arrays`` writes again.
    """

    def __init__(self) -> None:
        self._kinds: Tree = None  # dtype and shape of every leaf
        self._known: tuple[Tree, Tensor, Batch] | None = None  # kinds, their memory on the host, and its arrays

    def packed(self, batch: Batch) -> Tensor:
        """Return the bytes of all leaves on their device, ``[n]``."""
        self._kinds = tree.map(lambda x: (x.dtype, x.shape), batch)
        return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in tree.leaves(batch)])

    def arrays(self, packed: Tensor) -> Batch:
        """Return what was packed last, as arrays."""
        if self._known is None or self._known[0] != self._kinds:
            host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=packed.is_cuda)
            like = tree.map(lambda kind: torch.empty(kind[1], dtype=kind[0]).numpy(), self._kinds)
            pieces = iter(host.split([x.nbytes for x in tree.leaves(like)]))
            arrays = tree.map(lambda x: next(pieces).numpy().view(x.dtype).reshape(x.shape), like)
            self._known = self._kinds, host, arrays
        self._known[1].copy_(packed)
        return self._known[2]


def only(batch: Batch, keys: Container[str], nested: Collection[str] = ()) -> Batch:
    """Return the entries of ``batch`` whose keys are among ``keys``, and those of its groups ``nested``."""
    kept = {key: leaf for key, leaf in batch.items() if key in keys or key in nested}
    return kept | {name: only(batch[name], keys) for name in nested}


def chosen(like: Batch, batch: Batch) -> Batch:
    """Return the leaves of ``batch`` that ``like`` has."""
    return tree.map(lambda _, x: x, like, batch)


def merged(batch: Batch, more: Batch) -> Batch:
    """Return ``batch`` with the entries of ``more`` that it lacks, also in dicts that both have."""
    both = {key: merged(batch[key], x) for key, x in more.items() if isinstance(x, dict) and key in batch}
    return batch | {key: x for key, x in more.items() if key not in batch} | both


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

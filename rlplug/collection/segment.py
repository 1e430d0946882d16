"""Rows of a segment: their layout and their preallocated memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Needs
from rlplug.functional.previous import BEGINS, PREVIOUS, write_previous
from rlplug.host import on_device, to_array
from rlplug.types import Batch, EnvSpec, groups_of

RESULT = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
CORE = RESULT | {"is_first": np.bool_, "valid": np.bool_}


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
            before = tree.only(before | ({BEGINS: part["alive"]} if spec.has_agents else {}), needs.keys)
            after = {key: np.zeros(shape, dtype) for key, dtype in RESULT.items()}
            previous |= {name: before} if name else before
            result |= {name: after} if name else after
        more = {"previous": previous, "result": result, "is_first": np.ones(n, np.bool_)}
        if isinstance(x := next(tree.leaves(first)), Tensor):  # keep rows on the environment's device
            more = on_device(more, x.device)
        seen = tree.merged(first, more["previous"]) | {"is_first": more["is_first"]}
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
        self.seen, inputs = tree.chosen(seen, self.arrays), tree.chosen(seen, self.tensors)
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


def _zeros(x: Any, length: int, pin: bool) -> Any:
    if isinstance(x, Tensor):
        return torch.zeros(length, *x.shape, dtype=x.dtype, device=x.device)
    if pin and torch.cuda.is_available():
        return torch.zeros(length, *x.shape, dtype=torch.as_tensor(x[:1]).dtype).pin_memory().numpy()
    return np.zeros((length, *x.shape), x.dtype)


def as_it_is(x: Any) -> Any:
    return x

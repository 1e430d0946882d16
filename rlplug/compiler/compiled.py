"""Base of compiled functions: matching of batches, and flattening of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rlplug import tree
from rlplug.types import Batch

Function = Callable[[Batch], Any]


class Compiled:
    """``function(batch)`` without Python. Results may be nested dicts, lists and tuples.

    Args:
        batch: example; later batches must have its keys, shapes and dtypes.
        skip: leading axes of every leaf whose length may vary.
    """

    template: Any
    """structure of the result without tensors; see ``without``"""

    def __init__(self, batch: Batch, skip: int) -> None:
        self._skip, self._like = skip, tree.map(lambda x: (x.dtype, x.shape[skip:]), batch)

    def inputs(self, batch: Batch) -> list[Tensor] | None:
        """Return the leaves of a batch, or None if its keys, shapes or dtypes differ from the example."""
        inputs = list[Tensor]()
        return inputs if _matches(batch, self._like, self._skip, inputs) else None

    def run(self, inputs: list[Tensor]) -> Any:
        """Return the function's result for these leaves."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Any:
        """Return the function's result, or None if it does not support this batch."""
        return None if (inputs := self.inputs(batch)) is None else self.run(inputs)


def _matches(batch: Any, like: Batch, skip: int, inputs: list[Tensor]) -> bool:
    """Return whether a batch has the keys, dtypes and shapes of ``like``; append its leaves to ``inputs``."""
    if not isinstance(batch, dict) or batch.keys() != like.keys():
        return False
    for key, kind in like.items():
        x = batch[key]
        if isinstance(kind, dict):
            if not _matches(x, kind, skip, inputs):
                return False
        elif isinstance(x, dict) or (x.dtype, x.shape[skip:]) != kind:
            return False
        else:
            inputs.append(x.contiguous())
    return True


def without(value: Any, inputs: Sequence[Tensor], outputs: list[Tensor]) -> Any:
    """Return ``value`` with tensors replaced by ``...`` and appended to ``outputs``, and inputs by a slice."""
    if isinstance(value, Tensor):
        for i, x in enumerate(inputs):
            if x is value:
                return slice(i)
        outputs.append(value)
        return ...
    if isinstance(value, dict):
        return {key: without(part, inputs, outputs) for key, part in value.items()}
    return [without(part, inputs, outputs) for part in value] if isinstance(value, list | tuple) else value


def restored(value: Any, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> Any:
    """Return ``value`` with every ``...`` replaced by the next of ``outputs``, and slices by inputs."""
    if value is ...:
        return next(outputs)
    if isinstance(value, dict):  # fast path: most values are tensors
        return {key: next(outputs) if x is ... else restored(x, inputs, outputs) for key, x in value.items()}
    if isinstance(value, list):
        return [restored(part, inputs, outputs) for part in value]
    return inputs[value.stop] if isinstance(value, slice) else value

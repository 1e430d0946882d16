"""What is made of a segment before it leaves where it was collected: transforms, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from rlplug.api import Algorithm
from rlplug.collection.segment import CORE, as_it_is, on_device, only
from rlplug.context import RunContext
from rlplug.types import Batch

Transform: TypeAlias = Callable[[Batch], Batch]
"""takes a segment ``[T+1, B]`` and returns it changed, or with further keys"""


def transforms(
    algorithm: Algorithm, ctx: RunContext, keys: Sequence[str], preprocess: Transform = as_it_is
) -> list[Transform]:
    """Return ``Algorithm.postprocess``, the choice of what is stored and, where it is needed, initial priorities.

    Args:
        keys: what is stored of a row, with ``CORE`` and ``alive``.
        preprocess: what the learner sees of a segment, for initial priorities.
    """

    def prioritized(segment: Batch) -> Batch:
        if "priority" in segment:
            return segment
        seen = on_device(preprocess(segment), ctx.device)
        first = torch.where(seen["valid"][:-1], algorithm.initial_priorities(seen), 0.0)
        return segment | {"priority": torch.cat((first, torch.zeros_like(first[:1]))).cpu()}

    found: list[Transform] = [lambda segment: algorithm.postprocess(segment), stored(ctx, keys)]
    return [*found, prioritized] if "priority" in keys else found


def stored(ctx: RunContext, keys: Sequence[str]) -> Transform:
    """Return a function that keeps of a segment what is stored of it."""
    kept, nested = {*keys, *CORE, "alive"}, ctx.spec.nested
    return lambda segment: only(segment, kept, nested)


def finished(segment: Batch, transforms: Iterable[Transform]) -> Batch:
    """Return a segment as the transforms leave it."""
    for transform in transforms:
        segment = transform(segment)
    return segment

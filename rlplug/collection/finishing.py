"""Transforms of a segment on the collecting process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from rlplug import tree
from rlplug.api import Algorithm
from rlplug.collection.segment import CORE, as_it_is
from rlplug.context import RunContext
from rlplug.host import on_device
from rlplug.types import Batch

Transform: TypeAlias = Callable[[Batch], Batch]
"""maps a segment ``[T+1, B]`` to a changed one"""


def transforms(
    algorithm: Algorithm, ctx: RunContext, keys: Sequence[str], preprocess: Transform = as_it_is
) -> list[Transform]:
    """Return the transforms: ``Algorithm.postprocess``, selection of stored keys and, if needed, initial priorities.

    Args:
        keys: stored keys of a row, in addition to ``CORE`` and ``alive``.
        preprocess: maps a segment to the learner's inputs, for initial priorities.
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
    """Return a transform that selects the stored keys of a segment."""
    kept, nested = {*keys, *CORE, "alive"}, ctx.spec.nested
    return lambda segment: tree.only(segment, kept, nested)


def finished(segment: Batch, transforms: Iterable[Transform]) -> Batch:
    """Apply transforms to a segment."""
    for transform in transforms:
        segment = transform(segment)
    return segment

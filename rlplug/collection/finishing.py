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
    """Return the transforms: ``Algorithm.postprocess``, selection of stored keys and, if needed, ``annotate``.

    Args:
        keys: stored keys of a row, in addition to ``CORE`` and ``alive``.
        preprocess: maps a segment to the learner's inputs, for ``annotate``.
    """

    def annotated(segment: Batch) -> Batch:
        more = algorithm.annotate(on_device(preprocess(segment), ctx.device))
        return segment | tree.map(torch.Tensor.cpu, more)

    found: list[Transform] = [lambda segment: algorithm.postprocess(segment), stored(ctx, keys)]
    annotates = "priority" in keys or type(algorithm).annotate is not Algorithm.annotate
    return [*found, annotated] if annotates else found


def stored(ctx: RunContext, keys: Sequence[str]) -> Transform:
    """Return a transform that selects the stored keys of a segment."""
    kept, nested = {*keys, *CORE, "alive"}, ctx.spec.nested
    return lambda segment: tree.only(segment, kept, nested)


def finished(segment: Batch, transforms: Iterable[Transform]) -> Batch:
    """Apply transforms to a segment."""
    for transform in transforms:
        segment = transform(segment)
    return segment

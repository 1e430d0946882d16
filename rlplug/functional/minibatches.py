"""Minibatches, drawn over all ranks, and microbatches, whose losses are accumulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch


def minibatches(
    batch: Batch,
    size: int,
    unit: Literal["row", "column"],
    generator: torch.Generator,
    rank: int = 0,
    world_size: int = 1,
    counts: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[Batch]:
    """Split a segment ``[T+1, B]`` into shuffled minibatches, equally many on every rank.

    Args:
        size: rows or columns of a minibatch, over all ranks.
        unit: ``row``: flat batches of valid rows; ``column``: ``[T+1, size]``, columns with at least one valid row.
        generator: draws the same order on every rank.
        counts: returns its argument of every rank; None: every rank holds the whole batch, and takes every
            ``world_size``-th row.
    """
    valid = batch["valid"]
    length, columns = valid.shape
    if unit == "column":
        mine = valid.any(0).nonzero().squeeze(1)
    else:  # column-major, so that the order does not depend on the ranks
        places = torch.arange((length - 1) * columns, device=valid.device).view(-1, columns)
        mine = places.T.masked_select(valid[:-1].T)
    each = [len(mine)] if counts is None else counts(len(mine))
    total, offset = sum(each), 0 if counts is None else sum(each[:rank])
    order = torch.randperm(total, generator=generator, device=generator.device)
    bounds: Any = torch.linspace(0, total, min(total, max(1, round(total / size))) + 1).round().long()
    if world_size > 1:
        ours = (order >= offset) & (order < offset + len(mine))
        if counts is None:
            ours[torch.arange(total, device=ours.device) % world_size != rank] = False
        below = torch.cat([ours.new_zeros(1, dtype=torch.long), ours.cumsum(0)])
        bounds = below[bounds.to(below.device)]
        order = order[ours] - offset
    mine, cuts = mine.index_select(0, order), bounds.tolist()
    there = None
    if not valid.is_cpu and len(mine):
        mine, cuts, there = _padded(mine, cuts, size)
    rows = {key: leaf for key, leaf in batch.items() if key != "valid"}
    if unit == "row":  # three times as fast as x[mine]
        rows = tree.map(lambda x: x.flatten(0, 1).index_select(0, mine), rows)
    for low, high in pairwise(cuts):
        part = _pick(rows, 0, slice(low, high)) if unit == "row" else _pick(batch, 1, mine[low:high])
        if there is not None:
            part["valid"] = there[low:high] if unit == "row" else part["valid"] & there[low:high]
        yield part


def _padded(mine: Tensor, cuts: Sequence[int], size: int) -> tuple[Tensor, Sequence[int], Tensor]:
    """Pad minibatches on a device to one size with invalid rows or columns, so that one CUDA graph serves all.

    Sizes are multiples of ``size / 32``, so that a few graphs serve all rounds.

    Args:
        mine: rows or columns in order, ``[n]``.
        cuts: bounds of the minibatches, ``[parts + 1]``.

    Returns:
        New ``mine [parts x length]``, new ``cuts``, and a mask of valid elements of ``mine``.
    """
    step = max(1, size // 32)
    length = -(-max(high - low for low, high in pairwise(cuts)) // step) * step
    low, high = (torch.as_tensor(cuts[side], device=mine.device).unsqueeze(1) for side in (slice(-1), slice(1, None)))
    place = low + torch.arange(length, device=mine.device)
    index = mine[place.clamp(max=len(mine) - 1).view(-1)]
    return index, range(0, len(index) + 1, length), (place < high).view(-1)


def microbatches(batch: Batch, n: int) -> Iterator[Batch]:
    """Split a batch into ``n`` parts: flat rows ``[B]`` by rows, segments ``[T+1, B]`` by columns."""
    axis = column_axis(batch)
    size = next(x.shape[axis] for x in tree.leaves(batch) if x.ndim > axis)
    for i in range(n):
        yield _pick(batch, axis, slice(i * size // n, (i + 1) * size // n))


def column_axis(batch: Batch) -> int:
    """Return 1 for a segment ``[T+1, B]``, whose leaves ``[B]`` also belong to columns; 0 for flat rows ``[B]``."""
    return 0 if "valid" not in batch or batch["valid"].ndim == 1 else 1


def _pick(batch: Batch, axis: int, where: Any) -> Batch:
    return tree.map(lambda x: x[:, where] if axis and x.ndim > 1 else x[where], batch)

"""Cutting a batch into minibatches, which are drawn over all ranks, and into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import torch

from rlplug import tree
from rlplug.trainer.collectives import Collectives
from rlplug.types import Batch


def minibatches(
    batch: Batch,
    size: int,
    unit: Literal["row", "column"],
    generator: torch.Generator,
    collectives: Collectives,
    same: bool = False,
) -> Iterator[Batch]:
    """Cut a segment ``[T+1, B]`` into shuffled parts; see ``api.Learner.minibatches``.

    Args:
        generator: draws the same order on every rank.
        same: every rank holds the whole batch, and takes each ``world_size``-th row of it.
    """
    valid = batch["valid"]
    mine = valid.any(0) if unit == "column" else valid[:-1].T.flatten()
    mine = mine.nonzero().squeeze(1)  # row: column-major, so that the order does not depend on the ranks
    rank, world_size = collectives.rank, collectives.world_size
    counts = [len(mine)] if same else collectives.counts(len(mine))
    total, offset = sum(counts), 0 if same else sum(counts[:rank])
    order = torch.randperm(total, generator=generator, device=generator.device)
    cuts = torch.linspace(0, total, min(total, max(1, round(total / size))) + 1).round().long().tolist()
    if world_size > 1:
        ours = (order >= offset) & (order < offset + len(mine))
        if same:
            ours[torch.arange(total, device=ours.device) % world_size != rank] = False
        below = torch.cat([ours.new_zeros(1, dtype=torch.long), ours.cumsum(0)])
        cuts = below[torch.as_tensor(cuts, device=below.device)].tolist()
        order = order[ours] - offset
    mine = mine[order]
    if unit == "column":
        for low, high in pairwise(cuts):
            yield _pick(batch, 1, mine[low:high])
        return
    length, columns = valid.shape
    places = mine % (length - 1) * columns + mine // (length - 1)
    rows = tree.map(lambda x: x.flatten(0, 1)[places], {k: v for k, v in batch.items() if k != "valid"})
    for low, high in pairwise(cuts):
        yield _pick(rows, 0, slice(low, high))


def microbatches(batch: Batch, n: int) -> Iterator[Batch]:
    """Cut a batch into ``n`` parts: flat rows ``[B]`` by rows, segments ``[T+1, B]`` by columns."""
    axis = column_axis(batch)
    size = next(x.shape[axis] for x in tree.leaves(batch) if x.ndim > axis)
    for i in range(n):
        yield _pick(batch, axis, slice(i * size // n, (i + 1) * size // n))


def column_axis(batch: Batch) -> int:
    """Return 1 for a segment ``[T+1, B]``, where leaves ``[B]`` belong to columns too; 0 for flat rows ``[B]``."""
    return 0 if "valid" not in batch or batch["valid"].ndim == 1 else 1


def _pick(batch: Batch, axis: int, where: Any) -> Batch:
    """Take the rows or columns ``where`` of every leaf."""
    return tree.map(lambda x: x[:, where] if axis and x.ndim > 1 else x[where], batch)

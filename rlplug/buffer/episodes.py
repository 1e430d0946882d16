"""Whole episodes: several shares as one batch, and as a stream of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rlplug import tree
from rlplug.api import Segment
from rlplug.functional.returns import own_metrics
from rlplug.types import Batch

OF_EPISODE = ("return", "length", "success", "returns", "metrics")  # keys of a job's batch with a number per episode


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Concatenate episodes, leaves ``[L+1, n, ...]``, along the second axis; some batches may be empty,
    and all may have the numbers of ``OF_EPISODE`` only.

    Shorter episodes are padded by repeating their last row, which is not valid.
    """
    batches = [batch for batch in batches if batch]
    if not batches:
        return {}
    of_all = [key for key in OF_EPISODE if key in batches[0] and key != "metrics"]
    numbers = tree.cat([{key: batch[key] for key in of_all} for batch in batches]) | own_metrics(batches)
    rows = [{key: x for key, x in batch.items() if key not in OF_EPISODE} for batch in batches]
    if not rows[0]:
        return numbers
    longest = max(len(part["valid"]) for part in rows)
    padded = [tree.map(lambda x: torch.cat([x, x[-1:].expand(longest - len(x), *x.shape[1:])]), r) for r in rows]
    return tree.cat(padded, 1) | numbers


def stream(played: Batch, columns: int, most: int) -> Iterator[Segment]:
    """Yield the episodes of a job as segments of a stream, at most ``most`` transitions long.

    Each episode is in the shortest column. A column ends with a row that is not valid, repeated as often as needed.

    Args:
        played: leaves ``[L+1, episodes, ...]``, padded.
    """
    rows: list[list[Batch]] = [[] for _ in range(columns)]
    lengths = [0] * columns
    for e, length in enumerate(played["valid"].sum(0).tolist()):
        b = lengths.index(min(lengths))
        rows[b].append(tree.take(played, (slice(length + 1), e)))
        lengths[b] += length + 1
    final, total = tree.take(rows[0][-1], slice(-1, None)), max(lengths)
    pads = (tree.map(lambda x, n=n: x.expand(total + 1 - n, *x.shape[1:]), final) for n in lengths)
    padded = [[*own, pad] for own, pad in zip(rows, pads, strict=True)]
    joined = tree.map(lambda *leaves: torch.stack(leaves, 1), *map(tree.cat, padded))
    for t in range(0, total, most):
        yield Segment(tree.take(joined, slice(t, t + most + 1)), slice(0, columns))

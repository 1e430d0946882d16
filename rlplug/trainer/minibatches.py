"""Minibatches, drawn over all ranks, and microbatches, whose losses are accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Losses, Trainable
from rlplug.contract import mistake
from rlplug.trainer.collectives import Collectives
from rlplug.types import Batch

NO_LOSS = torch.zeros(())  # placeholder if gradients are given


def minibatches(
    batch: Batch, size: int, unit: Literal["row", "column"], generator: torch.Generator, ranks: Collectives, same: bool
) -> Iterator[Batch]:
    """Split a segment ``[T+1, B]`` into shuffled minibatches; see ``api.Learner.minibatches``.

    Args:
        generator: draws the same order on every rank.
        same: whether every rank holds the whole batch, and takes every ``world_size``-th row.
    """
    valid = batch["valid"]
    length, columns = valid.shape
    if unit == "column":
        mine = valid.any(0).nonzero().squeeze(1)
    else:  # column-major, so that the order does not depend on the ranks
        places = torch.arange((length - 1) * columns, device=valid.device).view(-1, columns)
        mine = places.T.masked_select(valid[:-1].T)
    counts = [len(mine)] if same else ranks.counts(len(mine))
    total, offset = sum(counts), 0 if same else sum(counts[: ranks.rank])
    order = torch.randperm(total, generator=generator, device=generator.device)
    cuts = torch.linspace(0, total, min(total, max(1, round(total / size))) + 1).round().long().tolist()
    if ranks.world_size > 1:
        ours = (order >= offset) & (order < offset + len(mine))
        if same:
            ours[torch.arange(total, device=ours.device) % ranks.world_size != ranks.rank] = False
        below = torch.cat([ours.new_zeros(1, dtype=torch.long), ours.cumsum(0)])
        cuts = below[torch.as_tensor(cuts, device=below.device)].tolist()
        order = order[ours] - offset
    mine = mine.index_select(0, order)
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


class Total(NamedTuple):
    """Detached losses of ``count`` valid rows, and the differentiable sum of their terms; all 0-d."""

    losses: Losses
    count: Tensor | float
    loss: Tensor


def forward(who: Trainable, batch: Batch, parts: Sequence[str], diagnostics: bool = True) -> Losses:
    """Compute the losses of parts and, if requested, the diagnostics."""
    losses = who.forward(batch, parts)
    if diagnostics and losses.diagnostics is not None:
        with torch.no_grad():
            losses.metrics |= losses.diagnostics()
    return losses


def total_loss(losses: Losses, valid: Tensor | None, alive: Tensor | None, who: Trainable, mean: bool) -> Total:
    """Reduce terms and metrics over valid rows.

    Args:
        losses: losses of ``who``; terms and metrics are ``[..., B]`` as ``valid``, or ``[..., B, N]`` as ``alive``, or
            one row less, or 0-d.
        valid: mask of rows; None: all rows count.
        alive: mask of agents, for terms with an agent axis; None: there are no agents.
        mean: return means; otherwise sums, to be divided by the global count, with 0-d values counted once per row.

    Raises:
        ConfigError: a term has another shape.
    """
    every = (*losses.terms.values(), *losses.metrics.values())
    if alive is not None and any(x.ndim == alive.ndim for x in every):
        valid = alive if valid is None else valid.view(*valid.shape, *(1 for _ in alive.shape[valid.ndim :])) & alive
    rows = next((x for x in every if x.ndim), every[0]) if valid is None else valid
    weight, count = None, 1.0 if mean else torch.ones_like(rows, dtype=torch.float32).sum()
    if valid is not None:
        weight, count = valid.float(), valid.sum().float()
        if mean:
            weight = weight / count.clamp(min=1.0)

    def reduced(x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x if mean else x * count
        w = weight if weight is None or x.shape == rows.shape else weight[: len(x)]
        if x.shape != (rows if w is None else w).shape:
            raise mistake(who, "forward", f"returned a term of shape {[*x.shape]} for rows {[*rows.shape]}")
        if w is None:
            return x.mean() if mean else x.sum()
        return torch.where(rows[: len(x)], x, 0.0).mul(w).sum()  # masks NaN of invalid rows, too

    terms = {name: reduced(term) for name, term in losses.terms.items()}
    metrics = {name: reduced(value.detach()) for name, value in losses.metrics.items()}
    detached = Losses({name: term.detach() for name, term in terms.items()}, metrics, losses.feedback)
    return Total(detached, count, reduce(torch.add, terms.values()))


def add_losses(a: Total, b: Total, axis: int) -> Total:
    """Add the sums of two microbatches; feedback is concatenated along ``axis``, or along its last axis."""
    x, y = a.losses, b.losses
    terms, metrics = tree.map(torch.add, x.terms, y.terms), tree.map(torch.add, x.metrics, y.metrics)
    feedback = tree.map(lambda p, q: torch.cat([p, q], min(axis, p.ndim - 1)), x.feedback, y.feedback)
    return Total(Losses(terms, metrics, feedback), a.count + b.count, a.loss)


def all_reduced(totals: Sequence[Total], axis: int, params: Sequence[Tensor], ranks: Collectives) -> Losses:
    """Turn sums over this rank's rows, and their gradients, into means over the valid rows of all ranks.

    A parameter without a gradient on any rank keeps none, because an optimizer would decay it on zeros.

    Args:
        totals: one per microbatch; their gradients are in ``.grad`` of ``params``.
        axis: column axis of the feedback.
    """
    sums = reduce(partial(add_losses, axis=axis), totals)
    losses, count = sums.losses, torch.as_tensor(sums.count, device=ranks.fabric.device)
    numbers = torch.stack([count, *losses.terms.values(), *losses.metrics.values()])
    params = [p for p in params if p.requires_grad]
    given = [p.grad is not None for p in params]
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params]
    grads = [numbers.new_tensor(given), *grads]
    flat = ranks.all_reduce(torch.cat([numbers, *grads]), "sum")
    flat /= flat[0].clamp(min=1.0)
    numbers, counts, *grads = flat.split([len(numbers), *map(torch.numel, grads)])
    for p, grad, n in zip(params, grads, given if all(given) else counts.tolist(), strict=True):
        p.grad = grad.view_as(p) if n else None
    values = iter(numbers[1:].clone().unbind())  # a copy, so a kept metric does not keep the gradients alive
    terms, metrics = ({name: next(values) for name in names} for names in (losses.terms, losses.metrics))
    return Losses(terms, metrics, losses.feedback)

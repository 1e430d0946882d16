"""Losses of microbatches, and their means over the valid rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Losses, Trainable
from rlplug.contract import mistake
from rlplug.distributed.collectives import Collectives
from rlplug.types import Batch


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

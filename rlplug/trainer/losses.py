"""From the terms of a ``forward``, per row, to the number that is differentiated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Losses, Trainable


class Total(NamedTuple):
    """The losses of some rows, reduced."""

    losses: Losses
    """detached, 0-d"""
    count: Tensor | float
    """number of valid rows"""
    loss: Tensor
    """0-d; the sum of the terms, which is differentiated"""


def total_loss(losses: Losses, valid: Tensor | None, who: Trainable, mean: bool) -> Total:
    """Reduce terms and metrics over valid rows.

    Args:
        losses: of ``who``; terms and metrics are ``[..., B]`` as ``valid``, or one row less, or 0-d.
        valid: which rows count; None: all.
        mean: return means. Otherwise sums, to be divided by the global count, where a 0-d value counts once a row.

    Raises:
        ValueError: a term has the shape of neither.
    """
    rows = next((x for x in (*losses.terms.values(), *losses.metrics.values()) if x.ndim), None)
    count: Tensor | float = float(rows.numel()) if rows is not None else 1.0
    weight = None
    if valid is not None:
        weight, count = valid.float(), valid.sum().float()
        if mean:
            weight = weight / count.clamp(min=1.0)

    def reduced(x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x if mean else x * count
        if weight is None:
            if rows is None or x.shape != rows.shape:
                raise ValueError(f"{type(who).__name__}: a term of shape {[*x.shape]} beside another's rows")
            return x.mean() if mean else x.sum()
        w = weight if x.shape == weight.shape else weight[: len(x)]
        if x.shape != w.shape:
            raise ValueError(f"{type(who).__name__}: a term of shape {[*x.shape]} for valid rows {[*weight.shape]}")
        return torch.where(w > 0, x, 0.0).mul(w).sum()

    terms = {name: reduced(term) for name, term in losses.terms.items()}
    metrics = {name: reduced(value.detach()) for name, value in losses.metrics.items()}
    loss = torch.stack(list(terms.values())).sum()
    return Total(Losses({k: v.detach() for k, v in terms.items()}, metrics, losses.feedback), count, loss)


def add_losses(a: Total, b: Total, axis: int) -> Total:
    """Add the sums of two microbatches; feedback is concatenated along ``axis``, or the last axis it has."""
    terms = {name: term + b.losses.terms[name] for name, term in a.losses.terms.items()}
    metrics = {name: metric + b.losses.metrics[name] for name, metric in a.losses.metrics.items()}
    feedback = tree.map(lambda x, y: torch.cat([x, y], min(axis, x.ndim - 1)), a.losses.feedback, b.losses.feedback)
    return Total(Losses(terms, metrics, feedback), a.count + b.count, a.loss)

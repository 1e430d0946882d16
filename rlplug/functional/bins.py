"""Regression of numbers of any magnitude by classification: Hafner et al. 2025 (arXiv:2301.04104), section "Robust
predictions"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    """Return ``sign(x) log(1 + |x|)`` of ``x [...]``, equation 9."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Invert ``symlog``: return ``sign(x) (exp |x| - 1)`` of ``x [...]``, equation 9."""
    return x.sign() * x.abs().expm1()


def symexp_bins(n: int) -> Tensor:
    """Return ``n`` increasing numbers ``symexp(-20 .. 20)``, ``[n]``, evenly spaced before ``symexp``, equation 10.

    They are symmetric to the bit, so that uniform probabilities have the mean 0.
    """
    half = symexp(torch.linspace(-20.0, 0.0, n // 2 + n % 2))
    return torch.cat((half, -half[: n // 2].flip(0)))


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Return the weights of the two bins next to ``x``, in inverse proportion to their distance, equation 11.

    Args:
        x: ``[...]``; numbers beyond the bins get the first or the last one.
        bins: ``[K]``, increasing.

    Returns:
        ``[..., K]``, nonnegative with sum 1 and mean ``x``.
    """
    index, weights = _neighbors(x, bins)
    return x.new_zeros(*x.shape, len(bins)).scatter(-1, index, weights)


def two_hot_loss(logits: Tensor, x: Tensor, bins: Tensor) -> Tensor:
    """Return the cross-entropy of ``two_hot(x [...])`` and ``softmax(logits [..., K])``, ``[...]``, equation 11."""
    return _CrossEntropy.apply(logits, *_neighbors(x, bins))  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """``-sum_i w_i log softmax(logits)_i`` over a few classes, with its gradient in closed form: fewer passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        p = logits.softmax(-1)
        ctx.save_for_backward(p, index, weights)
        log_sum = logits.amax(-1) - p.amax(-1).log()  # the largest probability is at least 1 / K
        return log_sum - (logits.gather(-1, index) * weights).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of ``logits [..., K]``; the weights ``[..., n]`` have the sum 1."""
        p, index, weights = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        return (p * grad).scatter_add_(-1, index, -weights * grad), None, None


def _neighbors(x: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two bins next to ``x [...]``, and their weights, ``[..., 2]``."""
    x = x.clamp(bins[0], bins[-1]).unsqueeze(-1)
    above = torch.searchsorted(bins, x, right=True).clamp(max=len(bins) - 1)
    index = torch.cat((above - 1, above), -1)
    low, high = bins[above - 1], bins[above]
    share = (x - low) / (high - low)
    return index, torch.cat((1.0 - share, share), -1)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Return the mean ``[...]`` of the bins ``[K]``, those of ``symexp_bins``, under ``softmax(logits [..., K])``.

    Probabilities of bins of opposite sign are subtracted first: in order, large bins would not cancel exactly, and the
    mean of uniform probabilities would not be 0.
    """
    p, half = logits.softmax(-1), len(bins) // 2
    return (p[..., -half:] - p[..., :half].flip(-1)) @ bins[-half:]

"""Decompositions of operations for the CPU, so that they fuse with their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# tanh(x) = x P(x^2) / Q(x^2) for |x| < 9; above, it is 1 in float32. Fitted by iteratively reweighted least squares
# (Lawson 1961), with a relative error of 2e-8; then P was scaled down by 2.4e-7, so that rounding to float32 does not
# exceed 1. In float32, the largest relative error is 7e-7.
P = (0.99999974, 0.133810214, 3.49558609e-3, 2.06090582e-5, 1.33546331e-8)
Q = (1.0, 0.467143402, 0.0258769776, 3.28563288e-4, 7.77654768e-7)
FEW = 16
"""maximum number of elements of an unrolled loop"""


def table() -> Mapping[Any, Callable[..., Any]]:
    """Return the decompositions, in the format of ``make_fx``."""
    aten = torch.ops.aten
    return {
        aten.tanh.default: tanh,
        aten.addmm.default: addmm,
        aten.baddbmm.default: addmm,
        aten.cumsum.default: cumsum,
        aten.searchsorted.Tensor: searchsorted,
    }


def tanh(x: Tensor) -> Tensor:
    """Return ``tanh(x) [...]`` with ten fused multiply-adds, ten times as fast as the library's."""
    if x.dtype != torch.float32:
        return NotImplemented
    x = x.clamp(-9.0, 9.0)
    z = x * x
    p, q = (reduce(lambda total, c: total * z + c, reversed(coefficients)) for coefficients in (P, Q))
    return x * p / q


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``a b + bias``, ``[n, m]`` or ``[E, n, m]``, without first copying the bias to every row."""
    plain = a.dtype == torch.float32 and beta == alpha == 1
    # with an additional axis, because the compiler would fuse both to ``addmm`` again
    return ((a @ b).unsqueeze(0) + bias).squeeze(0) if plain else NotImplemented


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return cumulative sums over a short axis, such as that of a few actions."""
    if dtype is not None or x.dtype != torch.float32 or x.ndim == 0 or x.shape[dim] > FEW:
        return NotImplemented
    return torch.stack([*accumulate(x.unbind(dim), torch.add)], dim)


def searchsorted(ordered: Tensor, values: Tensor, *, right: bool = False, **others: Any) -> Tensor:
    """Return how many of a few sorted numbers ``[..., n]`` are below, or equal to, each of ``values [..., m]``."""
    if any(x is not None and x is not False for x in others.values()) or not right or ordered.shape[-1] > FEW:
        return NotImplemented
    return (ordered.unsqueeze(-2) <= values.unsqueeze(-1)).sum(-1)

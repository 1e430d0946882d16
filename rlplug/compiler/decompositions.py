"""What operations become where they are compiled for a processor, to be done in one pass with their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# tanh(x) = x P(x^2) / Q(x^2) for |x| < 9; from there on it is 1 in float32. Fitted by least squares whose weights
# follow the error (Lawson 1961), which is 2e-8 of the value; then P was made smaller by 2.4e-7, so that rounding to
# float32 does not lead above 1. As float32 computes it, the largest relative error is 7e-7.
P = (0.99999974, 0.133810214, 3.49558609e-3, 2.06090582e-5, 1.33546331e-8)
Q = (1.0, 0.467143402, 0.0258769776, 3.28563288e-4, 7.77654768e-7)
FEW = 16
"""elements, up to which a loop over them is written out"""


def table() -> Mapping[Any, Callable[..., Any]]:
    """Return functions by operation, as ``make_fx`` takes them."""
    aten = torch.ops.aten
    return {
        aten.tanh.default: tanh,
        aten.addmm.default: addmm,
        aten.baddbmm.default: baddbmm,
        aten.cumsum.default: cumsum,
        aten.searchsorted.Tensor: searchsorted,
    }


def tanh(x: Tensor) -> Tensor:
    """Return ``tanh(x) [...]`` by ten multiplications with additions, a tenth of what the library's takes."""
    if x.dtype != torch.float32:
        return NotImplemented
    x = x.clamp(-9.0, 9.0)
    z = x * x
    return x * _polynomial(P, z) / _polynomial(Q, z)


def _polynomial(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    *lower, last = coefficients
    total: Any = last
    for c in reversed(lower):
        total = total * z + c
    return total


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``a b + bias``, ``[n, m]``, as ``baddbmm``."""
    plain = a.dtype == torch.float32 and beta == alpha == 1
    # with an axis more, or the compiler would make ``addmm`` of both again
    return (torch.mm(a, b).unsqueeze(0) + bias).squeeze(0) if plain else NotImplemented


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``a b + bias``, ``[E, n, m]``: the product does not begin with a copy of the bias for every row."""
    plain = a.dtype == torch.float32 and beta == alpha == 1
    return torch.bmm(a, b) + bias if plain else NotImplemented


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return sums of the first elements of an axis, which is as short as that of a few actions."""
    if dtype is not None or x.dtype != torch.float32 or x.ndim == 0 or x.shape[dim] > FEW:
        return NotImplemented
    return torch.stack([*accumulate(x.unbind(dim), torch.add)], dim)


def searchsorted(
    ordered: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Return how many of a few ordered numbers ``[..., n]`` are below, or equal to, each of ``values [..., m]``."""
    if out_int32 or side is not None or sorter is not None or not right or ordered.shape[-1] > FEW:
        return NotImplemented
    return (ordered.unsqueeze(-2) <= values.unsqueeze(-1)).sum(-1)

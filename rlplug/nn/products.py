"""Large float32 matrix products by oneDNN on AMD processors, where MKL does not use AVX-512.

torch multiplies matrices with MKL. On a Zen 5 core, MKL reaches 105 GFLOP/s, and oneDNN up to 245.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 2**24
"""minimum number of multiplications for which oneDNN saves more than these functions cost"""
FEW = 2**14
"""size of the input below which a product is never large, unless a layer has more than 1,024 units"""
DEEP = 32
"""minimum ratio of the result's size to the inner dimension; below it, oneDNN is slower: gradients of narrow layers"""


class Product(torch.autograd.Function):
    """``F.linear`` by oneDNN, differentiable any number of times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return ``x W' + b [n, out]`` of ``x [n, in]`` and ``weight [out, in]``."""
        args = (x.contiguous(), weight.contiguous(), bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise(*args)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        """Keep ``x [n, in]`` and ``weight [out, in]`` for the gradients."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of ``x [n, in]``, ``weight [out, in]`` and ``bias [out]``."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_x = linear(grad, weight.t()) if wanted[0] else None
        of_weight = linear(grad.t(), x.t()) if wanted[1] else None
        return of_x, of_weight, grad.sum(0) if wanted[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W' + b [..., out]`` of ``x [..., in]`` and ``weight [out, in]``, as ``F.linear``."""
    if is_few(x) or not by_onednn(x, weight, math.prod(x.shape[:-1]), *weight.shape):
        return F.linear(x, weight, bias)
    return Product.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def baddbmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x W + b [E, n, out]`` of ``x [E, n, in]`` and ``weight [E, in, out]``, as ``torch.baddbmm``."""
    if is_few(x) or not by_onednn(x, weight, x.shape[0] * x.shape[1], weight.shape[2], weight.shape[1]):
        return torch.baddbmm(bias, x, weight)
    return torch.stack([Product.apply(a, b.t(), c.squeeze(0)) for a, b, c in zip(x, weight, bias, strict=True)])


def is_few(x: Tensor) -> bool:
    """Return whether ``x [...]`` is small, as in acting, or a size that varies in a traced graph."""
    size = x.numel()
    return type(size) is not int or size < FEW


def by_onednn(x: Tensor, weight: Tensor, n: int, out: int, terms: int) -> bool:
    """Return whether oneDNN is faster for the product of ``x [..., n, terms]`` and a matrix of ``weight [...]``."""
    if n * terms * out < LARGE or n * out < DEEP * terms:
        return False
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return plain and torch.get_float32_matmul_precision() == "highest" and without_avx512()


@cache
def without_avx512() -> bool:
    """Return whether MKL does not use the AVX-512 instructions that this processor has."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_f")) and has["cpu_name"].startswith("AMD")

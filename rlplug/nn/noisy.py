"""Layers with noisy weights, for exploration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn.mlp import Linear, precise
from rlplug.nn.module import Module


class Draw(Protocol):
    """``rlplug.api.Context.randn``: normal noise ``[*shape]``."""

    def __call__(self, *shape: int, rows: bool) -> Tensor: ...


class NoisyLinear(Linear):
    """``y = (W + sigma_W * e_out e_in^T) x + b + sigma_b * e_out``: Fortunato et al. 2018 (arXiv:1706.10295).

    The noise is factorised Gaussian, ``e = sign(x) sqrt(|x|)`` of normal ``x``, and the same for all rows. It is
    initially 0, changes only in ``redraw``, and is not in ``state_dict``.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        sigma0: the initial standard deviations are ``sigma0 / sqrt(in_features)``.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, in_features: int, out_features: int, sigma0: float = 0.5) -> None:
        super().__init__(in_features, out_features)
        self.sigma_weight = nn.Parameter(torch.full_like(self.weight, sigma0 * in_features**-0.5))
        self.sigma_bias = nn.Parameter(torch.full_like(self.bias, sigma0 * in_features**-0.5))
        self.register_buffer("noise_in", torch.zeros(in_features), persistent=False)
        self.register_buffer("noise_out", torch.zeros(out_features), persistent=False)

    def forward(self, x: Tensor, noisy: bool = True) -> Tensor:
        """Map ``[..., in] -> [..., out]``; without noise, by the mean weights."""
        if not noisy:
            return super().forward(x)
        weight = torch.addcmul(self.weight, self.sigma_weight, self.noise_out[:, None] * self.noise_in)
        return F.linear(x, weight, torch.addcmul(self.bias, self.sigma_bias, self.noise_out))


class Stream(Module):
    """One stream of a Q-network: hidden layers with ReLU, then an output layer in float32.

    Args:
        sizes: sizes of the input, the hidden layers and the output.
        sigma0: makes all layers noisy, see ``NoisyLinear``; None: no noise.
    """

    def __init__(self, sizes: Sequence[int], sigma0: float | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Linear(n, m) if sigma0 is None else NoisyLinear(n, m, sigma0) for n, m in pairwise(sizes)
        )

    def forward(self, x: Tensor, noisy: bool) -> Tensor:
        """Map ``[..., in] -> [..., out]``, the first and the last of ``sizes``; without noise by the mean weights."""
        for i, layer in enumerate(self.layers, 1):
            args = (noisy,) if isinstance(layer, NoisyLinear) else ()
            x = torch.relu(layer(x, *args)) if i < len(self.layers) else precise(layer, x, *args)
        return x


def redraw(layers: Sequence[NoisyLinear], draw: Draw) -> None:
    """Sample new noise for all layers in one draw, the same on all ranks."""
    noise = [buffer for layer in layers for buffer in (layer.noise_in, layer.noise_out)]
    if noise:
        x = draw(sum(len(buffer) for buffer in noise), rows=False)
        fresh = (x.sign() * x.abs().sqrt()).split([len(buffer) for buffer in noise])
        torch._foreach_copy_(noise, fresh)

"""Fully connected layers, single or as an ensemble computed in one batched matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn.module import Module
from rlplug.nn.products import baddbmm, linear

Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu"]
Init: TypeAlias = Literal["orthogonal", "default"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class Linear(Module):
    """``y = x W + b``; with ``ensemble_size > 1``, that many independent ones on a leading axis.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        ensemble_size: members of the ensemble.
        gain: orthogonal weights of that gain and zero bias (Saxe et al. 2014, arXiv:1312.6120);
            None: uniform in ``+- in_features^-0.5``, as ``torch.nn.Linear``.
    """

    def __init__(
        self, in_features: int, out_features: int, *, ensemble_size: int = 1, gain: float | None = None
    ) -> None:
        super().__init__()
        self.ensemble_size = ensemble_size
        if ensemble_size == 1:
            self.weight = nn.Parameter(torch.empty(out_features, in_features))
            self.bias = nn.Parameter(torch.empty(out_features))
        else:
            self.weight = nn.Parameter(torch.empty(ensemble_size, in_features, out_features))
            self.bias = nn.Parameter(torch.empty(ensemble_size, 1, out_features))
        self.reset_parameters(gain)

    @torch.no_grad()
    def reset_parameters(self, gain: float | None = None) -> None:
        """Initialize the weights again; see the class for ``gain``."""
        if gain is None:
            bound = (self.weight.shape[-1] if self.ensemble_size == 1 else self.weight.shape[1]) ** -0.5
            self.weight.uniform_(-bound, bound)
            self.bias.uniform_(-bound, bound)
            return
        for member in [self.weight] if self.ensemble_size == 1 else self.weight:
            nn.init.orthogonal_(member, gain)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in] -> [..., out]``; an ensemble ``[E, ..., in] -> [E, ..., out]``: ``[B, in]`` goes to all."""
        if self.ensemble_size == 1:
            return linear(x, self.weight, self.bias)
        if self.weight.shape[2] == 1:  # several times faster than a batched product with one column
            lead = (self.ensemble_size, *(1,) * max(1, x.ndim - 2))
            return (x * self.weight.view(*lead, -1)).sum(-1, keepdim=True) + self.bias.view(*lead, 1)
        if x.ndim == 2:
            return baddbmm(self.bias, x.expand(self.ensemble_size, -1, -1), self.weight)
        if x.ndim == 3:
            return baddbmm(self.bias, x, self.weight)
        return baddbmm(self.bias, x.flatten(1, -2), self.weight).unflatten(1, x.shape[1:-1])

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"


def precise(layer: nn.Module, x: Any, *args: Any) -> Tensor:
    """Compute ``layer(x, *args)``, ``[..., in] -> [..., out]``, in float32, under autocast as well.

    For output layers: ratios, temporal differences and prediction errors are differences of their outputs, for which
    the 8 bits of bfloat16 are too few.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return layer(x, *args)
    with torch.autocast(x.device.type, enabled=False):
        return layer(x.float(), *args)


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450) with gain and bias per member.

    Input ``[..., size]``; of an ensemble ``[E, B, size]``.
    """

    def __init__(self, size: int, *, ensemble_size: int = 1) -> None:
        super().__init__(size)
        self.ensemble_size = ensemble_size
        if ensemble_size > 1:
            self.weight = nn.Parameter(torch.ones(ensemble_size, 1, size))
            self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, size))

    def forward(self, input: Tensor) -> Tensor:
        if self.ensemble_size == 1:
            return super().forward(input)
        return torch.addcmul(self.bias, F.layer_norm(input, self.normalized_shape, eps=self.eps), self.weight)


class MLP(Module):
    """Hidden layers, each followed by its activation, without an output layer. Without hidden layers, the identity.

    Args:
        in_features: size of the input.
        hidden: sizes of the layers.
        activation: after every layer.
        init: ``orthogonal`` with gain sqrt(2) and zero bias, or torch's ``default``.
        layer_norm: normalize before every activation.
        ensemble_size: members of the ensemble; all of them read the same input.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        activation: Activation = "relu",
        *,
        init: Init = "default",
        layer_norm: bool = False,
        ensemble_size: int = 1,
    ) -> None:
        super().__init__()
        self.in_features, self.ensemble_size = in_features, ensemble_size
        self.activation: Activation = activation
        self.out_dim = hidden[-1] if hidden else in_features
        gain = 2**0.5 if init == "orthogonal" else None
        sizes = [in_features, *hidden]
        self.layers = nn.ModuleList(
            Linear(n, m, ensemble_size=ensemble_size, gain=gain) for n, m in zip(sizes[:-1], hidden, strict=True)
        )
        self.norms = nn.ModuleList(LayerNorm(m, ensemble_size=ensemble_size) for m in hidden) if layer_norm else None

    def forward(self, x: Tensor, each: bool = False) -> Tensor:
        """Map ``[..., in] -> [..., out]``, with an ensemble ``[E, ..., out]``; ``each``: ``x`` has ``E``, too."""
        if self.ensemble_size == 1:
            return self._layers(x)
        lead = x.shape[each:-1]
        own = x.reshape(self.ensemble_size if each else 1, -1, self.in_features)
        features = self._layers(own.expand(self.ensemble_size, -1, -1))
        return features if len(lead) == 1 else features.unflatten(1, lead)

    def _layers(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        if self.norms is None:
            activate = (
                torch.relu_ if self.activation == "relu" else activate
            )  # in place: writes a wide layer's memory once
            for layer in self.layers:
                x = activate(layer.forward(x))  # not __call__, whose overhead exceeds a small product
            return x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = activate(norm(layer.forward(x)))
        return x

"""Convolutional networks over images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn.mlp import ACTIVATIONS, MLP, Activation, Init
from rlplug.nn.module import Module
from rlplug.nn.spaces import reaches_255
from rlplug.types import ConfigError

Filter: TypeAlias = tuple[int, int, int]
"""channels, kernel size and stride of a convolution"""


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether it is a Box of 3 axes: the first or last is the smallest, the others have at least 4 pixels."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and sorted(_sizes(space.shape)[1:])[0] >= 4


def _sizes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width; the smaller of the outer axes is the channels."""
    first, middle, last = shape
    return (first, middle, last) if first <= last else (last, first, middle)


class Pixels:
    """Converts images of ``space`` with any leading axes to ``[n, C, H, W]`` in channels-last memory format.

    This format is the fastest for convolutions. The result is float32; uint8 pixels become autocast's dtype if it is
    on. The channels are the smaller of the first and the last axis; the first one if they are equal.

    Args:
        space: a Box with 3 axes.
        pixel_max: divisor of pixels that are uint8 or from a space from 0 to 255.

    Raises:
        ConfigError: the space is not a Box with 3 axes.
    """

    def __init__(self, space: spaces.Space[Any], pixel_max: float = 255.0) -> None:
        if not isinstance(space, spaces.Box) or len(space.shape) != 3:
            raise ConfigError(
                "model",
                f"a convolutional network takes images, a Box [C, H, W] or [H, W, C], not {space}: use model=mlp, "
                "which flattens anything, or model=multi_input for images with other parts",
            )
        self.shape, self.scale, self.scales_all = space.shape, 1.0 / pixel_max, reaches_255(space)
        self.channels, self.height, self.width = _sizes(space.shape)
        self.channels_first = space.shape[0] <= space.shape[2]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *self.shape)
        x = x if self.channels_first else x.permute(0, 3, 1, 2)
        if x.dtype != torch.uint8:
            x = _channels_last(x, torch.float32)
            return x * self.scale if self.scales_all else x
        device = x.device.type
        seen = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return _channels_last(x, seen).mul_(self.scale)


def _channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x [n, C, H, W]`` in channels-last memory format; bytes are moved before they are converted."""
    last = torch.channels_last
    try:
        return x.contiguous(memory_format=last).to(dtype, memory_format=last)
    except RuntimeError:  # torch.vmap does not know this format; the strides are the same
        return x.permute(0, 2, 3, 1).contiguous().to(dtype).permute(0, 3, 1, 2)


class CNN(Module):
    """Convolutions without padding, each followed by its activation, then fully connected layers.

    Args:
        size: channels, height and width of the input.
        filters: of the convolutions.
        hidden: sizes of the fully connected layers.
        activation: after every layer.
        init: ``orthogonal`` with gain sqrt(2) and zero bias, or torch's ``default``.
        layer_norm: normalize before every activation; after a convolution, over channels and positions.

    Raises:
        ValueError: the image is too small for the filters.
    """

    def __init__(
        self,
        size: Sequence[int],
        filters: Sequence[Filter],
        hidden: Sequence[int],
        activation: Activation = "relu",
        *,
        init: Init = "default",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        channels, *sides = size
        convs: list[nn.Conv2d] = []
        for out, kernel, stride in filters:
            if min(sides) < kernel:
                raise ValueError(f"{sides[0]}x{sides[1]} pixels are left for a kernel of {kernel}x{kernel}")
            convs.append(_conv(channels, out, kernel, stride, init=init))
            channels, sides = out, [(side - kernel) // stride + 1 for side in sides]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.GroupNorm(1, c.out_channels) for c in convs) if layer_norm else None
        self.head = MLP(channels * math.prod(sides), hidden, activation, init=init, layer_norm=layer_norm)
        self.out_dim = self.head.out_dim

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, C, H, W] -> [n, out_dim]``."""
        activate = ACTIVATIONS[self.activation]
        for i, conv in enumerate(self.convs):
            x = conv(x)
            x = activate(x if self.norms is None else self.norms[i](x))
        return self.head(x.flatten(1))


class ResidualCNN(Module):
    """Sections of a convolution, a pooling that halves the sides, and two residual blocks; then as ``CNN``.

    Args:
        size: channels, height and width of the input.
        channels: of the sections.
        hidden: sizes of the fully connected layers.
        init: see ``CNN``.
        layer_norm: normalize before every activation.
    """

    def __init__(
        self,
        size: Sequence[int],
        channels: Sequence[int],
        hidden: Sequence[int],
        *,
        init: Init = "default",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        before, *sides = size
        sections: list[nn.Module] = []
        for out in channels:
            sections += [_conv(before, out, 3, padding=1, init=init), nn.MaxPool2d(3, 2, 1)]
            sections += [_Residual(out, init, layer_norm) for _ in range(2)]
            before, sides = out, [(side + 1) // 2 for side in sides]
        self.sections = nn.Sequential(*sections)
        self.norm = nn.GroupNorm(1, before) if layer_norm else None
        self.head = MLP(before * math.prod(sides), hidden, "relu", init=init, layer_norm=layer_norm)
        self.out_dim = self.head.out_dim

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, C, H, W] -> [n, out_dim]``."""
        x = self.sections(x)
        return self.head(F.relu(x if self.norm is None else self.norm(x)).flatten(1))


class _Residual(Module):
    """``x + conv(relu(conv(relu(x))))``."""

    def __init__(self, channels: int, init: Init, layer_norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(channels, channels, 3, padding=1, init=init) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(1, channels) for _ in range(2)) if layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, conv in enumerate(self.convs):
            y = conv(F.relu(y if self.norms is None else self.norms[i](y)))
        return x + y


def _conv(before: int, after: int, kernel: int, stride: int = 1, *, padding: int = 0, init: Init) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, kernel, stride, padding)
    if init == "orthogonal":
        nn.init.orthogonal_(conv.weight, 2**0.5)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv

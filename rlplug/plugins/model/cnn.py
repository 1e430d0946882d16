"""Convolutional networks for image observations."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rlplug import nn
from rlplug.api import Context, Model
from rlplug.nn import Activation, Init, Pixels
from rlplug.nn.cnn import Filter
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError

NATURE: list[Filter] = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
MEDIUM: list[Filter] = [(32, 4, 2), (64, 3, 2), (64, 3, 1)]
SMALL: list[Filter] = [(16, 2, 1), (32, 2, 1), (64, 2, 1)]


class Convolutional(Model):
    """Base of the networks: maps images ``[B, ...]`` or ``[T, B, ...]`` to features."""

    net: nn.CNN | nn.ResidualCNN

    def __init__(self, pixel_max: float, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "models are built inside another component, which gives them their input")
        self.pixels = Pixels(ctx.space, pixel_max)
        self.size = (self.pixels.channels, self.pixels.height, self.pixels.width)

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        lead = x.shape[:-3]
        return self.net(self.pixels(x)).unflatten(0, lead), carry


class NatureCNN(Convolutional):
    """Convolutions and fully connected layers, such as those of Mnih et al. 2015 (Nature 518), methods."""

    traceable = True
    batched: ClassVar[bool] = False

    @settings
    class Config:
        filters: list[tuple[PositiveInt, PositiveInt, PositiveInt]] | None = option(
            "Channels, kernel size and stride of each convolution; null: by the image size."
        )
        hidden: list[PositiveInt] = option("Sizes of the fully connected layers.")
        activation: Activation = option("Nonlinearity after every layer.")
        layer_norm: bool = option("Layer normalization before every activation.")
        init: Init = option("orthogonal (gain sqrt 2, zero bias) or default (torch's uniform).")
        pixel_max: PositiveFloat = option("Divisor of pixels that are uint8 or from a space from 0 to 255.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg.pixel_max, ctx)
        side = min(self.size[1:])
        auto = NATURE if side >= 36 else MEDIUM if side >= 16 else SMALL
        filters = auto if cfg.filters is None else cfg.filters
        try:
            self.net = nn.CNN(self.size, filters, cfg.hidden, cfg.activation, init=cfg.init, layer_norm=cfg.layer_norm)
        except ValueError as error:
            raise ConfigError("model.filters", self._too_small(filters, error)) from None
        self.out_dim = self.net.out_dim

    def _too_small(self, filters: list[Filter], error: ValueError) -> str:
        _, height, width = self.size
        way = "model=cnn chooses filters by the size of the image" if min(height, width) >= 4 else "use model=mlp"
        return f"{[list(f) for f in filters]} do not fit images of {height}x{width}: {error}; {way}"


class ImpalaCNN(Convolutional):
    """The deep residual network of IMPALA, Espeholt et al. 2018 (arXiv:1802.01561), figure 3, for any image size."""

    traceable = True
    batched: ClassVar[bool] = False

    @settings
    class Config:
        channels: list[PositiveInt] = option("Channels of the sections, each of which halves the image sides.")
        hidden: list[PositiveInt] = option("Sizes of the fully connected layers.")
        layer_norm: bool = option("Layer normalization before every activation.")
        init: Init = option("orthogonal (gain sqrt 2, zero bias) or default (torch's uniform).")
        pixel_max: PositiveFloat = option("Divisor of pixels that are uint8 or from a space from 0 to 255.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg.pixel_max, ctx)
        self.net = nn.ResidualCNN(self.size, cfg.channels, cfg.hidden, init=cfg.init, layer_norm=cfg.layer_norm)
        self.out_dim = self.net.out_dim

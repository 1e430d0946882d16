"""A multilayer perceptron on flattened observations."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import ModuleList

from rlplug import nn
from rlplug.api import Context, Model
from rlplug.nn import Activation, Flatten, Init, is_image
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, ConfigError

LARGE = 32
"""height and width of images that should not be flattened"""


class MLP(Model):
    """Hidden layers without a head. Computes the ``ctx.ensemble_size`` members in one batched product."""

    traceable = True
    batched: ClassVar[bool] = True

    @settings
    class Config:
        hidden: list[PositiveInt] = option("Sizes of the hidden layers.")
        activation: Activation = option("Nonlinearity after every layer.")
        layer_norm: bool = option("Layer normalization before every activation.")
        init: Init = option("orthogonal (gain sqrt 2, zero bias) or default (torch's uniform).")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "mlp is built inside another component, which gives it the space of its input")
        if is_image(ctx.space) and sorted(ctx.space.shape or ())[1] >= LARGE:
            said = f"mlp flattens images of the shape {ctx.space.shape}; model=cnn has convolutions and learns faster"
            warnings.warn(f"model: {said}", stacklevel=2)
        self.flatten = Flatten(ctx.space, embed=True)
        others = range(1, ctx.ensemble_size) if self.flatten.tables else ()  # each member has its own tables
        self.flattens = [self.flatten, *(Flatten(ctx.space, embed=True) for _ in others)]
        self.tables = ModuleList(table for flatten in self.flattens for table in flatten.tables)
        self.net = nn.MLP(
            self.flatten.size,
            cfg.hidden,
            cfg.activation,
            init=cfg.init,
            layer_norm=cfg.layer_norm,
            ensemble_size=ctx.ensemble_size,
        )
        self.out_dim = self.net.out_dim

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map a tree of ``ctx.space`` with leading ``[B]`` or ``[T, B]`` to features ``[..., out_dim]``.

        With ensemble_size the features are ``[E, ..., out_dim]``.
        """
        if len(self.flattens) == 1:
            return self.net(self.flatten(x)), carry
        return self.net(torch.stack([flatten(x) for flatten in self.flattens]), each=True), carry

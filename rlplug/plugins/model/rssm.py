"""The encoder of DreamerV3, and by its size the world model."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from rlplug.api import Context, Model
from rlplug.functional.bins import symlog
from rlplug.nn.rssm import SIZES, Encoder
from rlplug.settings import option, settings
from rlplug.types import Batch, ConfigError


class RSSM(Model):
    """Encodes vectors, images and dicts of both. A world model's algorithm builds all its networks in ``size``."""

    traceable = True

    @settings
    class Config:
        size: Literal["1m", "12m", "25m", "50m", "100m", "200m"] = option(
            "Widths of all networks, by their number of parameters."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "models are built inside another component, which gives them their input")
        self.size = SIZES[cfg.size]
        self.encoder = Encoder(ctx.space, self.size, symlog)
        self.out_dim = self.encoder.out_dim

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map observations ``[..., *space]`` to features ``[..., out_dim]``."""
        return self.encoder(x), carry

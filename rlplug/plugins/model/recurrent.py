"""LSTM and GRU on top of any other model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rlplug import nn
from rlplug.api import Context, Model
from rlplug.nn import Init
from rlplug.settings import ModelNode, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError


class Recurrent(Model):
    """Base of LSTM and GRU. The carry of a recurrent torso is stored under ``torso``."""

    recurrent: ClassVar[bool] = True
    layer: ClassVar[type[nn.Recurrent]]

    @settings
    class Config:
        torso: ModelNode = option("Model before the recurrent layer.")
        hidden: PositiveInt = option("Size of the recurrent state, and of the features.")
        layer_norm: bool = option("Layer normalization of the features, not of the recurrent state.")
        init: Init = option("orthogonal (gain 1 gate by gate, zero bias) or default (torch's uniform).")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "lstm and gru are built inside another component, which gives them their input")
        self.torso: Model = ctx.build(cfg.torso, ctx.space)
        self.core = self.layer(self.torso.out_dim, cfg.hidden, init=cfg.init)
        self.norm = nn.LayerNorm(cfg.hidden) if cfg.layer_norm else None
        self.out_dim = cfg.hidden

    def initial_carry(self, n: int) -> Batch:
        inner = self.torso.initial_carry(n)
        return self.core.initial_carry(n) | ({"torso": inner} if inner else {})

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map ``[B, ...]`` or ``[T, B, ...]`` to features ``[..., hidden]``.

        Args:
            carry: the state before the first row, shaped like ``initial_carry``; empty means ``initial_carry``.
            is_first: ``[B]`` or ``[T, B]``: clear the state before these rows; None: none.
        """
        features, inner = self.torso(x, carry.get("torso", {}), is_first)
        y, state = self.core(features, {key: carry[key] for key in self.core.states if carry}, is_first)
        return y if self.norm is None else self.norm(y), state | ({"torso": inner} if inner else {})


class LSTM(Recurrent):
    """An LSTM layer on top of a torso."""

    layer = nn.LSTM


class GRU(Recurrent):
    """A GRU layer on top of a torso."""

    layer = nn.GRU

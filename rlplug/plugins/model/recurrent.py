"""LSTM, GRU and attention with a memory on top of any other model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rlplug import nn
from rlplug.api import Context, Model
from rlplug.nn import Init
from rlplug.settings import ModelNode, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError


class OnTorso(Model):
    """Base of recurrent models: a core with a carry on top of a torso. A recurrent torso has its carry in ``torso``."""

    recurrent: ClassVar[bool] = True
    core: nn.Recurrent | nn.GTrXL

    def __init__(self, torso: Any, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "models are built inside another component, which gives them their input")
        self.torso: Model = ctx.build(torso, ctx.space)

    def initial_carry(self, n: int) -> Batch:
        inner = self.torso.initial_carry(n)
        return self.core.initial_carry(n) | ({"torso": inner} if inner else {})

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map ``[B, ...]`` or ``[T, B, ...]`` to features ``[..., out_dim]``.

        Args:
            carry: the state before the first row, shaped like ``initial_carry``; empty means ``initial_carry``.
            is_first: ``[B]`` or ``[T, B]``: clear the state before these rows; None: none.
        """
        features, inner = self.torso(x, carry.get("torso", {}), is_first)
        y, state = self.core(features, {key: carry[key] for key in self.core.states if carry}, is_first)
        return y, state | ({"torso": inner} if inner else {})


class Recurrent(OnTorso):
    """Base of LSTM and GRU."""

    layer: ClassVar[type[nn.Recurrent]]

    @settings
    class Config:
        torso: ModelNode = option("Model before the recurrent layer.")
        hidden: PositiveInt = option("Size of the recurrent state, and of the features.")
        layer_norm: bool = option("Layer normalization of the features, not of the recurrent state.")
        init: Init = option("orthogonal (gain 1 gate by gate, zero bias) or default (torch's uniform).")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg.torso, ctx)
        self.core = self.layer(self.torso.out_dim, cfg.hidden, init=cfg.init)
        self.norm = nn.LayerNorm(cfg.hidden) if cfg.layer_norm else None
        self.out_dim = cfg.hidden

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        y, carry = super().forward(x, carry, is_first)
        return y if self.norm is None else self.norm(y), carry


class LSTM(Recurrent):
    """An LSTM layer on top of a torso."""

    layer = nn.LSTM


class GRU(Recurrent):
    """A GRU layer on top of a torso."""

    layer = nn.GRU


class Attention(OnTorso):
    """A Gated Transformer-XL on top of a torso: Parisotto et al. 2019 (arXiv:1910.06764)."""

    traceable = True

    @settings
    class Config:
        torso: ModelNode = option("Model before the attention.")
        layers: PositiveInt = option("Layers, each of attention and a position-wise MLP.")
        dim: PositiveInt = option("Size of the inputs and outputs of every layer, and of the features.")
        heads: PositiveInt = option("Heads of the attention.")
        head_dim: PositiveInt = option("Size of the queries, keys and values of a head.")
        memory: PositiveInt = option("Rows before the current one that every layer attends to, within the episode.")
        mlp_dim: PositiveInt = option("Hidden units of the position-wise MLP.")
        gate_bias: float = option("Initial bias of the gates: how close to the identity a layer begins.")
        init: Init = option("Of the matrices: orthogonal (gain 1; MLP: sqrt 2) or default (torch's uniform).")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg.torso, ctx)
        self.core = nn.GTrXL(
            self.torso.out_dim,
            layers=cfg.layers,
            dim=cfg.dim,
            heads=cfg.heads,
            head_dim=cfg.head_dim,
            memory=cfg.memory,
            mlp_dim=cfg.mlp_dim,
            gate_bias=cfg.gate_bias,
            init=cfg.init,
        )
        self.out_dim = cfg.dim

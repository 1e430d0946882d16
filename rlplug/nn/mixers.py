"""Mixers: networks that combine the values of agents into the value of their team."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.functional import elu

from rlplug.nn.mlp import MLP, Linear, precise
from rlplug.nn.module import Module

Mixing: TypeAlias = Literal["qmix", "vdn", "none"]


class NoMixer(Module):
    """Keeps the values of the agents apart: independent Q-learning, Tan 1993."""

    def forward(self, q: Tensor, state: Tensor | None) -> Tensor:
        """Return ``q [..., N]``."""
        return q


class SumMixer(Module):
    """Adds the values of the agents: VDN, Sunehag et al. 2018 (arXiv:1706.05296), equation 3."""

    def forward(self, q: Tensor, state: Tensor | None) -> Tensor:
        """Map ``q [..., N]`` to ``[...]``."""
        return q.sum(-1)


class MonotonicMixer(Module):
    """QMIX, Rashid et al. 2018 (arXiv:1803.11485), section 4.1: hypernetworks of the state produce the weights.

    ``Q_tot = |w2| elu(|w1| q + b1) + b2`` never falls when the value of an agent rises. The absolute value is taken of
    weights, not of biases. The last bias comes from a network with a hidden layer.

    Args:
        agents: number of agents.
        state: size of the state.
        embed: size of the mixing network's hidden layer.
        hiddens: hidden layers of the hypernetworks of weights; the paper has none.
    """

    def __init__(self, agents: int, state: int, embed: int, hiddens: Sequence[int] = ()) -> None:
        super().__init__()
        self.shape = agents, embed

        def hyper(size: int) -> nn.Module:
            inner = MLP(state, hiddens)
            return nn.Sequential(inner, Linear(inner.out_dim, size))

        self.w1, self.w2 = hyper(agents * embed), hyper(embed)
        self.b1 = Linear(state, embed)
        self.b2 = nn.Sequential(MLP(state, [embed]), Linear(embed, 1))

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """Map ``q [..., N]`` and ``state [..., S]`` to ``Q_tot [...]``."""
        w1, b1, w2, b2 = (precise(net, state) for net in (self.w1, self.b1, self.w2, self.b2))
        hidden = elu((q.unsqueeze(-1) * w1.unflatten(-1, self.shape).abs()).sum(-2) + b1)
        return (hidden * w2.abs()).sum(-1) + b2.squeeze(-1)


def mixer_for(
    mixing: Mixing, agents: int, state: int, embed: int, hiddens: Sequence[int] = ()
) -> MonotonicMixer | SumMixer | NoMixer:
    """Build the mixer of this name; see ``MonotonicMixer`` for the sizes, which the others ignore."""
    if mixing == "qmix":
        return MonotonicMixer(agents, state, embed, hiddens)
    return SumMixer() if mixing == "vdn" else NoMixer()

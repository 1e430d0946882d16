"""Recurrent state-space model with Gaussian states: PlaNet, Hafner et al. 2019 (arXiv:1811.04551), as in Dreamer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn.mlp import MLP, Linear
from rlplug.nn.module import Module
from rlplug.types import Batch

LEAST_STD = 0.1


class GaussianRSSM(Module):
    """The world model's dynamics. A state is ``deter [..., D]``, of a GRU, and ``stoch [..., S]``, a Gaussian sample.

    Args:
        deter: size of the deterministic state.
        stoch: size of the stochastic state.
        hidden: size of the layers between.
        tokens: size of the encoder's output.
        action: size of an encoded action.
    """

    def __init__(self, deter: int, stoch: int, hidden: int, tokens: int, action: int) -> None:
        super().__init__()
        self.deter, self.stoch, self.out_dim = deter, stoch, deter + stoch
        self.inputs, self.cell = MLP(stoch + action, [hidden], "elu"), nn.GRUCell(hidden, deter)
        self.prior = nn.Sequential(MLP(deter, [hidden], "elu"), Linear(hidden, 2 * stoch))
        self.posterior = nn.Sequential(MLP(deter + tokens, [hidden], "elu"), Linear(hidden, 2 * stoch))

    def initial_carry(self, n: int) -> Batch:
        """Return the state before an episode: zeros ``deter [n, D]`` and ``stoch [n, S]``."""
        zeros = self.cell.weight_hh.new_zeros
        return {"deter": zeros(n, self.deter), "stoch": zeros(n, self.stoch)}

    def next_deter(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        """Return the next deterministic state from ``deter [n, D]``, ``stoch [n, S]`` and ``action [n, A]``."""
        return self.cell(self.inputs(torch.cat((stoch, action), -1)), deter)

    @staticmethod
    def gaussian(statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, ``[..., S]`` each, from a network's output ``[..., 2 S]``."""
        mean, std = statistics.chunk(2, -1)
        return mean, F.softplus(std) + LEAST_STD

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Predict the next state without an observation; ``noise [n, S]`` is normal, None: the mean."""
        deter = self.next_deter(deter, stoch, action)
        return deter, sampled(self.gaussian(self.prior(deter)), noise)

    def observe(self, tokens: Tensor, action: Tensor, is_first: Tensor, carry: Batch, noise: Tensor | None) -> Batch:
        """Return the states of consecutive rows, given their observations.

        Args:
            tokens: ``[T, B, F]``, output of the encoder.
            action: ``[T, B, A]``, encoded, of the row before.
            is_first: ``[T, B]``; the state before, and the action, are then zeros.
            carry: the state before row 0.
            noise: normal, ``[T, B, S]``; None: means.

        Returns:
            ``deter [T, B, D]``, ``stoch [T, B, S]``, and the posterior's ``mean`` and ``std [T, B, S]``.
        """
        keep = ~is_first.unsqueeze(-1)
        action, (deter, stoch) = action * keep, (carry["deter"], carry["stoch"])
        states = list[tuple[Tensor, ...]]()
        for t in range(len(tokens)):
            deter = self.next_deter(deter * keep[t], stoch * keep[t], action[t])
            mean, std = self.gaussian(self.posterior(torch.cat((deter, tokens[t]), -1)))
            stoch = sampled((mean, std), None if noise is None else noise[t])
            states.append((deter, stoch, mean, std))
        names = ("deter", "stoch", "mean", "std")
        return {name: torch.stack(x) for name, x in zip(names, zip(*states, strict=True), strict=True)}


def sampled(gaussian: tuple[Tensor, Tensor], noise: Tensor | None) -> Tensor:
    """Return a reparameterized sample of mean and standard deviation ``[..., S]``; None: the mean."""
    mean, std = gaussian
    return mean if noise is None else mean + std * noise

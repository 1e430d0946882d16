"""Ensembles of networks that predict the next observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlplug.nn.mlp import MLP, Activation, Linear, precise
from rlplug.nn.module import Module
from rlplug.nn.moments import Moments


class Dynamics(Module):
    """Predicts how an action ``[action]`` changes an observation ``[obs]``, with E networks trained on the same data.

    Args:
        obs: size of an observation.
        action: size of an action.
        hidden: sizes of the hidden layers.
        activation: after every layer.
        members: E, at least 2.
        normalize: normalize inputs and changes by their moments.
    """

    def __init__(
        self, obs: int, action: int, hidden: Sequence[int], activation: Activation, members: int, normalize: bool
    ) -> None:
        super().__init__()
        self.members, self.normalize = members, normalize
        self.net = MLP(obs + action, hidden, activation, ensemble_size=members)
        self.change = Linear(self.net.out_dim, obs, ensemble_size=members)
        self.inputs, self.changes = Moments((obs + action,)), Moments((obs,))

    def observe(self, obs: Tensor, action: Tensor, next_obs: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Add transitions ``[n, ...]`` to the moments, which change with ``commit``; see ``Moments.add``."""
        if self.normalize:
            self.inputs.add(torch.cat([obs, action], -1), gather)
            self.changes.add(next_obs - obs, gather)

    def commit(self) -> None:
        """Normalize by the moments of all that was added until now."""
        self.inputs.commit()
        self.changes.commit()

    def forward(self, obs: Tensor, action: Tensor, each: bool = False) -> Tensor:
        """Return normalized changes ``[E, N, obs]`` of ``obs [N, ...]`` for all, or with ``each`` ``[E, N, ...]``."""
        x = (torch.cat([obs, action], -1) - self.inputs.mean) * self.inputs.scale()
        return precise(self.change, self.net(x, each))

    def errors(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        """Return the squared error of normalized changes, the mean over members and numbers, ``[N]``."""
        target = (next_obs - obs - self.changes.mean) * self.changes.scale()
        return (self(obs, action) - target).square().mean((0, -1))

    def step(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the next observations ``[E, N, obs]`` by each member, of ``obs`` and ``action`` ``[E, N, ...]``."""
        return obs + self.changes.mean + self(obs, action, each=True) / self.changes.scale()

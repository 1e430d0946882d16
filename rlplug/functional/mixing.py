"""Team values from the values of agents, and rows of a team from rows of its agents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu


def monotonic(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Compute ``Q_tot = |w2| elu(|w1| q + b1) + b2``, which never falls when the value of an agent rises.

    Source: Rashid et al. 2018 (arXiv:1803.11485), section 4.1.

    Args:
        q: ``[..., N]``, values of the agents.
        w1: ``[..., N, E]``.
        b1: ``[..., E]``.
        w2: ``[..., E]``.
        b2: ``[...]``.

    Returns:
        ``[...]``.
    """
    hidden = elu((q.unsqueeze(-1) * w1.abs()).sum(-2) + b1)
    return (hidden * w2.abs()).sum(-1) + b2


def team_reward(reward: Tensor, alive: Tensor) -> Tensor:
    """Return the mean reward of all ``N`` agents, ``[..., N] -> [...]``, where those not ``alive`` get 0."""
    return torch.where(alive, reward, 0.0).mean(-1)


def present(alive: Tensor, terminated: Tensor) -> Tensor:
    """Return the agents whose values count in a row: those that act, and those that a truncation has stopped.

    Args:
        alive: ``[T, B, N]`` bool.
        terminated: ``[T, B, N]`` bool, read where an agent is alive.

    Returns:
        ``[T, B, N]`` bool. Nobody counts after the last agent has terminated.
    """
    stopped = alive[:-1] & ~terminated[:-1]
    return torch.cat((alive[:1], alive[1:] | stopped))

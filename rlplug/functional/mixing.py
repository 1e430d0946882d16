"""Rows of a team from rows of its agents."""

from __future__ import annotations

import torch
from torch import Tensor


def team_reward(reward: Tensor, alive: Tensor) -> Tensor:
    """Return the mean reward of all ``N`` agents, ``[..., N] -> [...]``, where those not ``alive`` get 0."""
    return torch.where(alive, reward, 0.0).mean(-1)


def present(alive: Tensor, terminated: Tensor) -> Tensor:
    """Return the agents whose values count in a row: those that act, and those that a truncation has stopped.

    Args:
        alive: ``[T, B, N]`` bool.
        terminated: ``[T, B, N]`` bool, read where an agent is alive.

    Returns:
        ``[T, B, N]`` bool. No agent counts after the last agent has terminated.
    """
    stopped = alive[:-1] & ~terminated[:-1]
    return torch.cat((alive[:1], alive[1:] | stopped))

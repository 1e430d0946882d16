"""Losses of world models with categorical states, and returns of imagined trajectories: DreamerV3, Hafner et al. 2025
(arXiv:2301.04104)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.functional.returns import reverse_scan
from rlplug.types import Batch


def balanced_kl(posterior: Tensor, prior: Tensor, free_nats: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the losses of dynamics and representation, equation 3.

    ``max(free, KL(sg(posterior) || prior))`` trains the prior, ``max(free, KL(posterior || sg(prior)))`` the posterior.

    Args:
        posterior: probabilities ``[..., S, C]`` of ``S`` variables, all above zero.
        prior: the same.
        free_nats: KL divergence, summed over the variables, below which there is no gradient.

    Returns:
        Both losses, ``[...]``.
    """

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum((-2, -1)).clamp(min=free_nats)

    return kl(posterior.detach(), prior), kl(posterior, prior.detach())


def lambda_returns(
    reward: Tensor, value: Tensor, discount: Tensor, lambda_: float, last: Tensor | None = None
) -> Tensor:
    """Compute ``R_t = r_{t+1} + d_{t+1} ((1 - lambda) v_{t+1} + lambda R_{t+1})`` with ``R_T = v_T``, equation 5.

    A row holds the reward that led to it, as in the paper.

    Args:
        reward: ``[T+1, ...]``; row 0 is not read.
        value: ``[T+1, ...]``; row 0 is not read.
        discount: ``[T+1, ...]``, 0 where an episode has terminated; row 0 is not read.
        lambda_: weight of longer returns.
        last: ``[T+1, ...]`` bool, last rows of episodes, from which returns bootstrap; None: none.

    Returns:
        ``R [T, ...]``.
    """
    reward, value, discount = reward[1:], value[1:], discount[1:]
    decay = discount * lambda_ if last is None else discount * lambda_ * ~last[1:]
    x = reward + (discount - decay) * value
    x = torch.cat((x[:-1], torch.addcmul(x[-1:], decay[-1:], value[-1:])))
    return reverse_scan(decay, x)


def ends_of_episodes(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows of a sequence are terminal, which are the last of their episode, and where that is known.

    Args:
        batch: ``valid``, ``terminated`` and ``is_first``, ``[T, B]``; a final observation is not valid.

    Returns:
        Bool, ``[T, B]`` each. How an episode ended before the sequence is unknown in row 0, if this is its final
        observation. Row T-1 is never the last one: the next row is unknown.
    """
    first, final = batch["is_first"], ~batch["valid"]
    no = torch.zeros_like(final[:1])
    terminal = torch.cat((no, batch["terminated"][:-1] & ~final[:-1] & ~first[1:]))
    return terminal, torch.cat((first[1:], no)), torch.cat((~final[:1], torch.ones_like(final[1:])))

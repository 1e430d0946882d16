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


def arrivals(batch: Batch) -> Batch:
    """Return what led to each row of a sequence, from rows that hold what follows from their action.

    Args:
        batch: ``reward``, ``valid``, ``terminated`` and ``is_first``, ``[T, B]``; a final observation is not valid.

    Returns:
        ``reward``, 0 where an episode begins, and bool ``terminal`` and ``last``: whether the row ends its episode for
        good, and whether it is its last one; row T-1 never is, since the next row is unknown. ``rewarded`` and
        ``known`` are False in row 0 if the reward before it, and how its episode ended, are unknown: ``[T, B]`` each.
    """
    first, final = batch["is_first"], ~batch["valid"]
    no, acted = torch.zeros_like(final[:1]), batch["valid"][:-1] & ~first[1:]
    reward = torch.where(acted, batch["reward"][:-1], 0.0)
    return {
        "reward": torch.cat((torch.zeros_like(reward[:1]), reward)),
        "rewarded": torch.cat((first[:1], ~no.expand_as(acted))),
        "terminal": torch.cat((no, batch["terminated"][:-1] & acted)),
        "known": torch.cat((~final[:1], ~no.expand_as(acted))),
        "last": torch.cat((first[1:], no)),
    }

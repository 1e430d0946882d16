"""Losses of offline RL that avoid overestimating the values of actions outside the dataset."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_sum_exp(q: Tensor, temperature: float = 1.0, dim: int = -1) -> Tensor:
    """Return ``T log sum_a exp(Q(s, a) / T)``: Kumar et al. 2020 (arXiv:2006.04779), equation 4.

    Args:
        q: ``[..., A, ...]``, values of every action; masked ones have the smallest finite number.
        temperature: ``T``, above 0.
        dim: the axis of the actions.
    """
    return temperature * (q / temperature).logsumexp(dim)


def sampled_log_sum_exp(q: Tensor, log_density: Tensor, temperature: float = 1.0) -> Tensor:
    """Estimate ``T log integral exp(Q(s, a) / T) da`` by importance sampling: arXiv:2006.04779, appendix F.

    Args:
        q: ``[..., K, B]``, values of ``K`` sampled actions.
        log_density: ``[K, B]``, of each action under the distribution that it was sampled from, not under a mixture.
        temperature: ``T``, above 0.

    Returns:
        ``[..., B]``, ``T`` times the log of the mean over ``K``.
    """
    return temperature * ((q / temperature - log_density).logsumexp(-2) - math.log(q.shape[-2]))


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Return ``|tau - 1(u < 0)| u^2`` of ``u [...]``: Kostrikov et al. 2021 (arXiv:2110.06169), section 4.1.

    Args:
        error: target minus estimate.
        expectile: ``tau``; 0.5: half the squared error. Near 1, the minimizer is near the largest target.
    """
    return torch.where(error < 0, 1.0 - expectile, expectile) * error.square()

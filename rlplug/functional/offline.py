"""Learning action values from recorded actions alone: what keeps them low, or off, where nothing was recorded."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_sum_exp(q: Tensor, temperature: float = 1.0, dim: int = -1) -> Tensor:
    """Return ``T log sum_a exp(Q(s, a) / T)``, a soft maximum: Kumar et al. 2020 (arXiv:2006.04779), equation 4.

    Args:
        q: ``[..., A, ...]``, values of every action; the least finite number where one is not allowed.
        temperature: ``T``, above 0.
        dim: the axis of the actions.
    """
    return temperature * (q / temperature).logsumexp(dim)


def sampled_log_sum_exp(q: Tensor, log_density: Tensor, temperature: float = 1.0) -> Tensor:
    """Estimate ``T log integral exp(Q(s, a) / T) da`` by importance sampling: arXiv:2006.04779, appendix F.

    Args:
        q: ``[..., K, B]``, values of ``K`` sampled actions.
        log_density: ``[K, B]``, of each of them under the distribution that it was drawn from, not one of them all.
        temperature: ``T``, above 0.

    Returns:
        ``[..., B]``: the log of the mean over the ``K``.
    """
    return temperature * ((q / temperature - log_density).logsumexp(-2) - math.log(q.shape[-2]))


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Return ``|tau - 1(u < 0)| u^2`` of ``u [...]``: Kostrikov et al. 2021 (arXiv:2110.06169), section 4.1.

    Args:
        error: what the estimate falls short, target minus estimate.
        expectile: ``tau``; 0.5: half the squared error. Near 1 the minimum is near the largest target.
    """
    return torch.where(error < 0, 1.0 - expectile, expectile) * error.square()

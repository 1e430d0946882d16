"""Imitation of recorded actions: their likelihood and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_likelihood(dist: Any, action: Tensor, log_std_coeff: float = 0.0) -> Tensor:
    """Return ``log pi(a)``, plus ``log_std_coeff`` times the mean log standard deviation for Gaussian actions.

    Args:
        dist: a ``nn.Distribution`` of ``action [..., *event]``.
        log_std_coeff: above 0, maximizing the sum gives wider Gaussians.

    Returns:
        ``[...]``.
    """
    logp = dist.logp(action)
    if log_std_coeff and hasattr(dist, "log_std"):
        logp = logp + log_std_coeff * dist.log_std.mean(-1)
    return logp


def advantage_weight(advantage: Tensor, sqd_adv_norm: Tensor, beta: float, max_weight: float | None = None) -> Tensor:
    """Return ``exp(beta A / c)``: Wang et al. 2018 (MARWIL), algorithm 1, with advantages in units of ``c``.

    Args:
        advantage: ``[...]``.
        sqd_adv_norm: ``c^2``, 0-d: the moving average of the squared advantages.
        beta: inverse temperature; 0: all weights are 1.
        max_weight: maximum of the result; None: no maximum, and the result may be infinite.
    """
    weight = torch.exp(beta * advantage / (sqd_adv_norm.sqrt() + 1e-8))
    return weight if max_weight is None else weight.clamp(max=max_weight)

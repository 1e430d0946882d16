"""Learning from recorded actions: how likely a policy makes them, and how much each of them counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_likelihood(dist: Any, action: Tensor, log_std_coeff: float = 0.0) -> Tensor:
    """Return ``log pi(a)``, and for Gaussian actions ``log_std_coeff`` times the mean log standard deviation beside it.

    Args:
        dist: a ``nn.Distribution`` of ``action [..., *event]``.
        log_std_coeff: above 0, a maximum of the sum has wider Gaussians.

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
        beta: how much better actions are preferred; 0: not at all.
        max_weight: limit of the result; None: off, and it may be infinite.
    """
    weight = torch.exp(beta * advantage / (sqd_adv_norm.sqrt() + 1e-8))
    return weight if max_weight is None else weight.clamp(max=max_weight)

"""Losses of policy-gradient methods, per row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Compute PPO's objective, to be maximized: Schulman et al. 2017 (arXiv:1707.06347), equation 7.

    Args:
        ratio: ``[...]``, new over old probability of the action.
        advantage: ``[...]``.
        clip: epsilon.

    Returns:
        ``min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)``, ``[...]``.
    """
    clamp: Callable[..., Tensor] = torch.clamp  # its stub has no signature for float | Tensor
    return torch.minimum(ratio * advantage, clamp(ratio, 1.0 - clip, 1.0 + clip) * advantage)


def clipped_value_loss(value: Tensor, old_value: Tensor, ret: Tensor, clip: float | None) -> Tensor:
    """Compute the squared error of a clipped value prediction, as in the code of arXiv:1707.06347.

    Args:
        value: ``[...]``, prediction.
        old_value: ``[...]``, prediction at collection.
        ret: ``[...]``, target.
        clip: maximum change from ``old_value``, in units of the value. None: unclipped.

    Returns:
        ``max((value - ret)^2, (clipped value - ret)^2)``, ``[...]``.
    """
    error = (value - ret).square()
    if clip is None:
        return error
    clipped = old_value + torch.clamp(value - old_value, -clip, clip)
    return torch.maximum(error, (clipped - ret).square())


def adapt_kl_coeff(coeff: Tensor, kl: Tensor, target: float) -> Tensor:
    """Adapt the weight of PPO's KL penalty: arXiv:1707.06347, section 4, with RLlib's constants.

    Args:
        coeff: current weight, 0-d.
        kl: measured divergence of the new policy from the old one, 0-d.
        target: the target divergence.

    Returns:
        ``1.5 * coeff`` if ``kl > 2 * target``, ``0.5 * coeff`` if ``kl < 0.5 * target``, else ``coeff``; 0-d.
    """
    return torch.where(kl > 2.0 * target, 1.5 * coeff, torch.where(kl < 0.5 * target, 0.5 * coeff, coeff))

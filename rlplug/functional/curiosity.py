"""Intrinsic rewards, per row."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.functional.returns import reverse_scan


def prediction_error(predicted: Tensor, actual: Tensor) -> Tensor:
    """``1/2 ||predicted - actual||^2`` over the last axis: Pathak et al. 2017 (arXiv:1705.05363), equation 5."""
    return 0.5 * (predicted - actual).square().sum(-1)


def discounted_sum(reward: Tensor, valid: Tensor, before: Tensor, gamma: float) -> Tensor:
    """``R_t = gamma R_{t-1} + r_t`` in time order, across ends of episodes: the filter whose deviation RND divides by
    (Burda et al. 2018, arXiv:1810.12894, section 2.4).

    Args:
        reward: ``[T, B]``.
        valid: ``[T, B]`` bool; other rows leave ``R`` as it is.
        before: ``R_{-1} [B]``.
        gamma: discount factor.

    Returns:
        ``R [T, B]``.
    """
    decay = torch.where(valid, reward.new_tensor(gamma), 1.0)
    reward = torch.where(valid, reward, 0.0)
    reward = torch.cat((torch.addcmul(reward[:1], decay[:1], before), reward[1:]))
    return reverse_scan(decay.flip(0), reward.flip(0)).flip(0)

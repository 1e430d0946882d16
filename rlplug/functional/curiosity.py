"""Intrinsic rewards, per row."""

from __future__ import annotations

from torch import Tensor


def prediction_error(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return ``||predicted - actual||^2 / 2 [...]`` of ``[..., F]``: Pathak et al. 2017 (arXiv:1705.05363), eq. 5."""
    return 0.5 * (predicted - actual).square().sum(-1)

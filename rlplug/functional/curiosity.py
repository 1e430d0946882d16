"""Intrinsic rewards, per row."""

from __future__ import annotations

from torch import Tensor


def prediction_error(predicted: Tensor, actual: Tensor) -> Tensor:
    """``1/2 ||predicted - actual||^2`` over the last axis: Pathak et al. 2017 (arXiv:1705.05363), equation 5."""
    return 0.5 * (predicted - actual).square().sum(-1)

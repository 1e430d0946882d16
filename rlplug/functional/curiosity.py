"""Intrinsic rewards, per row."""

from __future__ import annotations

from torch import Tensor

from rlplug.types import Batch


def prediction_error(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return ``||predicted - actual||^2 / 2 [...]`` of ``[..., F]``: Pathak et al. 2017 (arXiv:1705.05363), eq. 5."""
    return 0.5 * (predicted - actual).square().sum(-1)


def rewarded(batch: Batch, bonus: Tensor | dict[str, Tensor]) -> Batch:
    """Return rows with an intrinsic reward added to ``reward`` and ``reward_int``, ``[T+1, B]``.

    Args:
        batch: rows, or ``{group: rows}``.
        bonus: ``[T+1, B]`` like the rewards, or one per group.
    """
    if isinstance(bonus, dict):
        return batch | {name: rewarded(batch[name], x) for name, x in bonus.items()}
    intrinsic = batch["reward_int"] + bonus if "reward_int" in batch else bonus
    return batch | {"reward": batch["reward"] + bonus, "reward_int": intrinsic}

"""Meta-learning: baselines that are fitted to each task, and penalties for the divergence of each adaptation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlplug import tree
from rlplug.functional.returns import gae
from rlplug.types import Batch


def stacked(tasks: Sequence[Batch]) -> Batch:
    """Stack rows ``[L+1, M, ...]`` of K tasks to ``[K, L+1, M, ...]``, where ``L`` is the longest.

    Shorter ones are padded with their last row, which is not ``valid``.
    """
    longest = max(len(rows["valid"]) for rows in tasks)
    return tree.map(lambda *x: torch.stack([_padded(leaf, longest) for leaf in x]), *tasks)


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x[-1:].expand(length - len(x), *x.shape[1:])])


def baseline_features(obs: Tensor) -> Tensor:
    """Return ``[K, L+1, M, 2 d + 4]``: observations ``[K, L+1, M, d]``, their squares, powers of time, and 1.

    Duan et al. 2016 (arXiv:1604.06778), supplement, section 2.
    """
    x = obs.clamp(-10.0, 10.0)
    time = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).view(-1, 1, 1).expand(*x.shape[:3], 1) / 100.0
    return torch.cat([x, x.square(), time, time.square(), time**3, torch.ones_like(time)], -1)


def linear_baseline(obs: Tensor, ret: Tensor, valid: Tensor, ridge: float = 1e-5) -> Tensor:
    """Fit returns by linear regression on ``baseline_features``, one fit per task.

    Args:
        obs: ``[K, L+1, M, d]``; every column is one episode.
        ret: returns of the rows, ``[K, L+1, M]``.
        valid: ``[K, L+1, M]`` bool, rows to fit.
        ridge: weight of the squared coefficients.

    Returns:
        Predictions ``[K, L+1, M]``, zero in rows that are not valid: nothing is earned after an episode.
    """
    x = torch.where(valid.unsqueeze(-1), baseline_features(obs.double()), 0.0).flatten(1, 2)
    y = torch.where(valid, ret.double(), 0.0).flatten(1).unsqueeze(-1)
    square = x.mT @ x + ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    solve: Callable[[Tensor, Tensor], Tensor] = torch.linalg.solve
    return (x @ solve(square, x.mT @ y)).view_as(ret).to(ret.dtype)


def task_advantages(rows: Batch, gamma: float, lambda_: float) -> Tensor:
    """Return advantages ``[K, L+1, M]`` over each task's linear baseline, with mean 0 and deviation 1 in every task.

    Args:
        rows: ``obs [K, L+1, M, d]``, ``reward``, ``terminated`` and ``valid``, ``[K, L+1, M]``.
    """
    reward, over, valid = (rows[key].transpose(0, 1) for key in ("reward", "terminated", "valid"))
    _, ret = gae(reward, torch.zeros_like(reward), over, valid, gamma, 1.0)
    value = linear_baseline(rows["obs"], ret.transpose(0, 1), rows["valid"]).transpose(0, 1)
    advantage = gae(reward, value, over, valid, gamma, lambda_)[0].transpose(0, 1)
    mean = task_mean(advantage, rows["valid"]).view(-1, 1, 1)
    std = task_mean((advantage - mean).square(), rows["valid"]).sqrt().view(-1, 1, 1)
    return torch.where(rows["valid"], (advantage - mean) / (std + 1e-8), 0.0)


def task_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Return the mean ``[K]`` of ``x [K, ...]`` over the valid rows of every task."""
    rows = valid.flatten(1)
    return torch.where(rows, x.flatten(1), 0.0).sum(1) / rows.sum(1).clamp(min=1)


def adapt_kl_coeffs(coeff: Tensor, kl: Tensor, target: float) -> Tensor:
    """Return the weights ``[N]`` of the divergence of each adaptation: twice or half where ``kl [N]`` is 1.5 times off.

    RLlib's and ProMP's rule (Rothfuss et al. 2018, arXiv:1810.06784).
    """
    return torch.where(kl > 1.5 * target, 2.0 * coeff, torch.where(kl < target / 1.5, 0.5 * coeff, coeff))

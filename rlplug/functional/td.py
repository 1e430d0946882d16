"""Temporal-difference learning of action values."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.functional.returns import reverse_scan


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """Return ``error^2 / 2`` of ``error [...]`` up to ``delta``, linear beyond: Huber 1964.

    Mnih et al. 2015 call it clipping the error.
    """
    # the kernel of torch.nn.functional.huber_loss, whose wrapper takes longer than the loss of a batch
    return torch._C._nn.huber_loss(error, error.new_zeros(()), 0, delta)  # type: ignore[attr-defined]


def dueling(value: Tensor, advantage: Tensor, dim: int = -1) -> Tensor:
    """Compute ``Q = V + A - mean(A)``: Wang et al. 2016 (arXiv:1511.06581), equation 9.

    Args:
        value: as ``advantage``, with size 1 along ``dim``.
        advantage: ``[..., A, ...]``.
        dim: the axis of the actions.
    """
    return value + advantage - advantage.mean(dim, keepdim=True)


def greedy(q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the allowed action with the highest value.

    Args:
        q: ``[..., A]``.
        mask: ``[..., A]`` bool, the allowed actions; None: all.

    Returns:
        ``[...]`` int64.
    """
    return forbid(q, mask).argmax(-1)


def gather_action(q: Tensor, action: Tensor) -> Tensor:
    """Select the values of one action, from ``q [..., A]`` or ``[..., A, K]``, by ``action [...]`` int64."""
    if q.ndim == action.ndim + 1:
        return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    index = action[..., None, None].expand(*action.shape, 1, q.shape[-1])
    return q.gather(-2, index).squeeze(-2)


def forbid(q: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``q [..., A]`` with the smallest finite number for actions masked by ``mask [..., A]``; None: no mask."""
    return q if mask is None else q.masked_fill(~mask, torch.finfo(q.dtype).min)


def rescale(x: Tensor, eps: float) -> Tensor:
    """Return ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x`` of ``x [...]``.

    Source: Pohlen et al. 2018 (arXiv:1805.11593), proposition A.2.
    """
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + eps * x  # avoids cancellation


def inverse_rescale(x: Tensor, eps: float) -> Tensor:
    """Invert ``rescale`` of ``x [...]``, with the same ``eps``."""
    root = (1.0 + 4.0 * eps * (x.abs() + 1.0 + eps)).sqrt()
    return x.sign() * ((2.0 * (x.abs() + 1.0 + eps) / (root + 1.0)).square() - 1.0)


def retrace(
    reward: Tensor, q: Tensor, expected: Tensor, trace: Tensor, terminated: Tensor, valid: Tensor, gamma: float
) -> Tensor:
    """Compute Retrace targets of action values: Munos et al. 2016 (arXiv:1606.02647), equation 4, over stream rows.

    ``G_t = r_t + gamma (E_{t+1} + c_{t+1} (G_{t+1} - Q_{t+1}))``, where the outer parentheses
    vanish after termination, and ``c`` after the last valid row of an episode.

    Args:
        reward: ``[T+1, B]``.
        q: ``[T+1, B]``, value of the taken action.
        expected: ``[T+1, B]``, value of the row under the evaluated policy, also of final observations and row T.
        trace: ``[T+1, B]``, ``c = lambda min(1, pi(a) / mu(a))``.
        terminated: ``[T+1, B]`` bool.
        valid: ``[T+1, B]`` bool.
        gamma: discount factor.

    Returns:
        ``G [T, B]``, equal to ``q`` on rows that are not valid.
    """
    discount = (~terminated[:-1]).to(q.dtype) * gamma
    error = torch.where(valid[:-1], reward[:-1] + discount * expected[1:] - q[:-1], 0.0)
    decay = torch.where(valid[:-1], discount * trace[1:], 0.0)  # the error of a row that is not valid is zero
    return q[:-1] + reverse_scan(decay, error)

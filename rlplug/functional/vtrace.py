"""V-trace: values of a policy from segments of older policies."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.functional.returns import reverse_scan


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    valid: Tensor,
    gamma: float,
    lambda_: float = 1.0,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace targets and advantages: Espeholt et al. 2018 (arXiv:1802.01561), section 4.

    ``v_s = V_s + sum_{t>=s} gamma^{t-s} (prod_{i=s}^{t-1} c_i) rho_t (r_t + gamma V_{t+1} - V_t)``, equation 1, where
    ``rho_t = min(clip_rho, ratio_t)`` and ``c_i = lambda min(clip_c, ratio_i)``. ``clip_rho`` determines the
    policy whose value is estimated, ``clip_c`` the speed of convergence. The policy gradient's advantage of row ``s``
    is ``min(clip_pg_rho, ratio_s) (r_s + gamma v_{s+1} - V_s)``, section 4.2. On-policy (all ratios 1), the targets are
    those of TD(lambda), and ``v_s - V_s`` is the advantage of ``gae``, which treats ends of episodes equally.

    Args:
        log_rho: ``[T+1, B]``, log-probability of the action under the learned policy minus that under the behavior
            policy; ``ratio`` is its exponential. It is detached.
        reward: ``[T+1, B]``; rows that are not valid are ignored.
        value: ``[T+1, B]``, of every row's observation, also of final observations and row T; detached.
        terminated: ``[T+1, B]`` bool.
        valid: ``[T+1, B]`` bool; row T is ignored, since it begins no transition.
        gamma: discount factor.
        lambda_: weight of longer returns.
        clip_rho: clip of the ratio that weights a temporal difference; None: none.
        clip_c: clip of the trace-cutting ratios; None: none.
        clip_pg_rho: clip of the ratio in the advantage; None: none.

    Returns:
        ``v [T+1, B]``, equal to ``value`` on rows that are not valid, and the advantage ``[T+1, B]``, 0 on these.
    """
    ratio, valid = log_rho[:-1].exp(), valid[:-1]
    rho, c, pg_rho = (ratio if limit is None else ratio.clamp(max=limit) for limit in (clip_rho, clip_c, clip_pg_rho))
    discount = (~terminated[:-1]).to(value.dtype) * gamma
    delta = rho * (torch.addcmul(reward[:-1], discount, value[1:]) - value[:-1])
    error = reverse_scan(torch.where(valid, lambda_ * discount * c, 0.0), torch.where(valid, delta, 0.0))
    target = torch.cat((value[:-1] + error, value[-1:]))
    advantage = pg_rho * (torch.addcmul(reward[:-1], discount, target[1:]) - value[:-1])
    advantage = torch.where(valid, advantage, 0.0)
    return target, torch.cat((advantage, torch.zeros_like(advantage[:1])))

"""Off-policy evaluation: estimate a policy's return from episodes of another policy.

Columns are whole episodes, ``[T, B]``, from their first step on; shorter ones are padded with rows that are not
``valid``. An ended episode stays in an absorbing state: its reward is 0 and its weight constant, so that at every step
the weights of all ``B`` episodes have expectation 1.

Every estimator returns one number per episode, ``[B]``. Their mean is the estimate, and ``mean_interval`` returns its
confidence interval. A self-normalized estimator returns its linearization (the delta method): the numbers depend on
the other episodes, and their mean is exactly the estimate.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from rlplug.functional.returns import reverse_scan

IMPOSSIBLE = -1e30
"""log-weights below this are those of weight 0; ``nn.Categorical`` has the lowest finite number instead of -inf"""


def log_weights(target: Tensor, behavior: Tensor, valid: Tensor) -> Tensor:
    """Return ``log rho_{0:t}``, where ``rho_{0:t} = prod_{k<=t} pi(a_k | s_k) / b(a_k | s_k)``: Precup et al. 2000.

    Args:
        target: ``log pi(a_t | s_t) [T, B]``, of the evaluated policy.
        behavior: ``log b(a_t | s_t) [T, B]``, of the behavior policy.
        valid: ``[T, B]`` bool; the weight of other rows is that of the last valid one.
    """
    return torch.where(valid, target - behavior, 0.0).cumsum(0)


def importance_sampling(
    reward: Tensor, log_weight: Tensor, valid: Tensor, gamma: float, *, per_step: bool = True
) -> Tensor:
    """Weight rewards by importance ratios of the actions before them: Precup et al. 2000.

    ``sum_t gamma^t rho_{0:t} r_t`` per step, and ``rho_{0:T-1} sum_t gamma^t r_t`` per episode. Both are unbiased.

    Args:
        reward: ``[T, B]``.
        log_weight: ``[T, B]``, see ``log_weights``.
        valid: ``[T, B]`` bool.
        gamma: discount factor.

    Returns:
        ``[B]``.
    """
    weight = (log_weight if per_step else log_weight[-1:]).exp()
    return _discounted(weight * torch.where(valid, reward, 0.0), gamma).sum(0)


def weighted_importance_sampling(
    reward: Tensor, log_weight: Tensor, valid: Tensor, gamma: float, *, per_step: bool = True
) -> Tensor:
    """Divide by the sum of the weights instead of their number: Precup et al. 2000. Biased, with less variance.

    ``sum_t gamma^t (sum_i rho^i_{0:t} r^i_t) / (sum_i rho^i_{0:t})`` per step, which is the consistent weighted
    per-decision estimator of Thomas 2015 (dissertation): sums are over all episodes, including ended ones.
    ``(sum_i rho^i G^i) / (sum_i rho^i)`` per episode, of returns ``G^i`` and weights ``rho^i`` of all steps. NaN if all
    weights of a step are 0.

    Args: see ``importance_sampling``.

    Returns:
        ``[B]``.
    """
    reward = torch.where(valid, reward, 0.0)
    if per_step:
        return _discounted(_normalized_mean(reward, log_weight), gamma).sum(0)
    return _normalized_mean(_discounted(reward, gamma).sum(0, keepdim=True), log_weight[-1:]).sum(0)


def doubly_robust(
    reward: Tensor, q: Tensor, value: Tensor, log_weight: Tensor, valid: Tensor, gamma: float, *, weighted: bool = False
) -> Tensor:
    """Correct a model of action values by its importance-weighted errors: Jiang & Li 2016 (arXiv:1511.03722).

    ``sum_t gamma^t (rho_{0:t} (r_t - Q(s_t, a_t)) + rho_{0:t-1} V(s_t))``. It is unbiased for any model
    that was not fitted to the same episode, and has low variance if the model is good.

    Args:
        reward: ``[T, B]``.
        q: ``Q(s_t, a_t) [T, B]``, the model's value of the taken action.
        value: ``V(s_t) [T, B]``, the mean of ``Q(s_t, a)`` over the actions of the target policy.
        log_weight: ``[T, B]``, see ``log_weights``.
        valid: ``[T, B]`` bool.
        gamma: discount factor.
        weighted: divide by the sums of the weights: Thomas & Brunskill 2016 (arXiv:1604.00923), WDR; NaN if all
            weights of a step are 0.

    Returns:
        ``[B]``.
    """
    error, value = (torch.where(valid, x, 0.0) for x in (reward - q, value))
    before = torch.cat((torch.zeros_like(log_weight[:1]), log_weight[:-1]))
    if weighted:
        terms = _normalized_mean(error, log_weight) + _normalized_mean(value, before)
    else:
        terms = log_weight.exp() * error + before.exp() * value
    return _discounted(terms, gamma).sum(0)


def regression(reward: Tensor, log_weight: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return targets and weights for a regression of action values: Farajtabar et al. 2018 (arXiv:1802.03493).

    The target of row ``t`` is ``sum_{t' >= t} gamma^(t'-t) rho_{t+1:t'} r_t'``, an unbiased estimate of the evaluated
    policy's ``Q(s_t, a_t)``; its weight is ``gamma^t rho_{0:t}``, divided by the mean over valid rows.

    Args: see ``importance_sampling``.

    Returns:
        ``[T, B]`` each.
    """
    ratio = torch.cat((log_weight[1:] - log_weight[:-1], torch.full_like(log_weight[:1], -torch.inf))).exp()
    weight = torch.where(valid, _discounted((log_weight - log_weight.max()).exp(), gamma), 0.0)
    mean = weight.sum() / valid.sum()
    return reverse_scan(gamma * ratio, torch.where(valid, reward, 0.0)), weight / mean


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """Return ``(sum_i w_i)^2 / sum_i w_i^2``, 0-d: the number of equally informative equal weights (Kong 1992).

    It is 0 if all weights are 0.

    Args:
        log_weight: ``log w [B]``, of whole episodes.
    """
    share = log_weight.softmax(0)
    return torch.where((log_weight < IMPOSSIBLE).all(), 0.0, 1.0 / share.square().sum())


def mean_interval(values: Tensor, confidence: float = 0.95) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of ``values [B]``, ``B >= 2``, and the bounds of its Student's t interval, 0-d each.

    It is exact for normal values, and asymptotically valid for others with finite variance.
    """
    n, mean = len(values), values.mean()
    half = student_quantile(0.5 + confidence / 2, n - 1) * values.std() / math.sqrt(n)
    return mean, mean - half, mean + half


def student_quantile(p: float, df: int) -> float:
    """Return the ``p``-quantile of Student's t distribution with ``df`` degrees of freedom.

    Exact for 1 and 2; else the expansion of Abramowitz & Stegun 1964, 26.7.5, with an error below 0.5 % for
    ``df >= 3`` and ``p <= 0.975``.
    """
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / df**i for i, term in enumerate(terms))


def _discounted(x: Tensor, gamma: float) -> Tensor:
    """Return ``gamma^t x_t`` of ``x [T, B]``."""
    return x * torch.pow(gamma, torch.arange(len(x), dtype=x.dtype, device=x.device)).unsqueeze(-1)


def _normalized_mean(x: Tensor, log_weight: Tensor) -> Tensor:
    """Return numbers ``[T, B]`` whose mean over ``B`` is ``m_t = sum_i w_i x_i / sum_i w_i``.

    They are ``m_t + B w_i (x_i - m_t) / sum_j w_j``, the linearization of this ratio.
    """
    share = log_weight.softmax(1)
    share = share.masked_fill((log_weight < IMPOSSIBLE).all(1, keepdim=True), torch.nan)
    mean = (share * x).sum(1, keepdim=True)
    return mean + x.shape[1] * share * (x - mean)

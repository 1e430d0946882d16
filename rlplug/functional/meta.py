"""Meta-learning: adaptation by policy-gradient steps, and baselines that are fitted to each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlplug import tree
from rlplug.functional.policy_gradient import clipped_surrogate
from rlplug.functional.returns import gae
from rlplug.types import Batch, Weights

Evaluate: TypeAlias = Callable[[Weights, Batch], tuple[Tensor, Tensor, Tensor]]
"""log-probabilities of actions, KL divergences from ``dist``, and entropies of rows, by weights of every task"""


def stacked(tasks: Sequence[Batch]) -> Batch:
    """Stack rows ``[L+1, M, ...]`` of K tasks to ``[K, L+1, M, ...]``, where ``L`` is the longest.

    Shorter ones are padded with their last row, which is not ``valid``. Numbers of episodes ``[M]`` are stacked to
    ``[K, M]``; ``metrics``, of which tasks may have different ones, are left out.
    """
    longest = max(len(rows["valid"]) for rows in tasks)
    first, *others = ({key: x for key, x in rows.items() if key != "metrics"} for rows in tasks)
    return tree.map(lambda *x: torch.stack([_padded(leaf, longest) for leaf in x]), first, *others)


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x[-1:].expand(length - len(x), *x.shape[1:])]) if x.ndim > 1 else x


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
    linalg: Any = torch.linalg  # without type stubs
    coefficients: Tensor = linalg.solve(square, x.mT @ y)
    return (x @ coefficients).view_as(ret).to(ret.dtype)


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
    """Return the weights ``[N]`` of each adaptation's divergence: doubled or halved where ``kl [N]`` is 1.5 times off.

    RLlib's and ProMP's rule (Rothfuss et al. 2018, arXiv:1810.06784).
    """
    return torch.where(kl > 1.5 * target, 2.0 * coeff, torch.where(kl < target / 1.5, 0.5 * coeff, coeff))


def adapted(evaluate: Evaluate, weights: Weights, rows: Batch, lr: float, create_graph: bool) -> tuple[Weights, Tensor]:
    """Make one step for each task: Finn et al. 2017 (arXiv:1703.03400), equations 1 and 4.

    The surrogate is the likelihood ratio to the policy that acted times the advantage. Its first derivative is the
    policy gradient; the derivative of the step has the terms of the sampling distribution (Rothfuss et al. 2018,
    arXiv:1810.06784, section 4).

    Args:
        evaluate: the policy's ``AdaptivePolicy.evaluate``.
        weights: of every task, ``[K, ...]``.
        rows: as for ``evaluate``, with ``logp``, ``advantage`` and ``valid``, ``[K, L+1, M]``.
        lr: size of the step.
        create_graph: keep the graph of the step, for second-order gradients; else it is a constant.

    Returns:
        New weights ``[K, ...]``, and the mean divergence of the old ones from the policy that acted, ``[K]``.
    """
    logp, kl, _ = evaluate(weights, rows)
    gain = task_mean((logp - rows["logp"]).exp() * rows["advantage"], rows["valid"])
    grads: Any = torch.autograd.grad(gain.sum(), [*weights.values()], create_graph=create_graph, retain_graph=True)
    after = {name: w + lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}
    return after, task_mean(kl, rows["valid"])


def meta_objective(
    evaluate: Evaluate,
    weights: Weights,
    rounds: Sequence[Batch],
    lr: float,
    first_order: bool,
    clip: float,
    kl_coeff: Tensor,
    entropy_coeff: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the objective of MAML after an adaptation to every task, through which the gradient flows.

    Args:
        evaluate: the policy's ``AdaptivePolicy.evaluate``.
        weights: weights before the adaptation, of every task, ``[K, ...]``.
        rounds: rows before the adaptation and after each of its N steps, as for ``adapted``.
        lr: size of these steps.
        first_order: treat their gradients as constants.
        clip: epsilon of the clipped surrogate.
        kl_coeff: weight of the divergence of each step, ``[N]``.
        entropy_coeff: weight of the entropy bonus.

    Returns:
        Terms ``policy``, ``kl_penalty`` and ``entropy``, ``[K]`` each, the last two if their weight is not 0; and
        metrics ``[K]``: the divergences ``kl_<step>``, that of the adapted policy ``kl``, and ``mean_entropy``.
    """
    kls, last = list[Tensor](), rounds[-1]
    for rows in rounds[:-1]:
        weights, kl = adapted(evaluate, weights, rows, lr, create_graph=not first_order)
        kls.append(kl)
    logp, kl, entropy = evaluate(weights, last)
    gain = clipped_surrogate((logp - last["logp"]).exp(), last["advantage"], clip)
    terms = {"policy": -task_mean(gain, last["valid"])}
    if len(kl_coeff):
        terms["kl_penalty"] = (kl_coeff * torch.stack(kls, -1)).sum(-1)
    entropy = task_mean(entropy, last["valid"])
    if entropy_coeff:
        terms["entropy"] = -entropy_coeff * entropy
    metrics = {f"kl_{step}": x for step, x in enumerate(kls)} | {"kl": task_mean(kl, last["valid"])}
    return terms, {name: x.detach() for name, x in (metrics | {"mean_entropy": entropy}).items()}

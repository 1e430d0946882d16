"""A policy that adapts to tasks by policy-gradient steps, through which the gradient may go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap  # type: ignore[attr-defined]

from rlplug.functional.meta import task_mean
from rlplug.nn.actor_critic import Policy
from rlplug.types import Batch, Weights

ROWS = ("obs", "action", "dist", "action_mask")


class AdaptivePolicy(Policy):
    """Acts with one set of weights, and evaluates rows of K tasks with weights of their own, leaves ``[K, ...]``."""

    def forward(self, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        dist, _ = self.dist(rows, {})
        return dist.logp(rows["action"]), dist.kl_from(rows["dist"]), dist.entropy()

    def initial(self, tasks: int) -> Weights:
        """Return the own weights of every task, ``[tasks, ...]``, as views through which gradients add up."""
        return {name: w.unsqueeze(0).expand(tasks, *w.shape) for name, w in self.named_parameters()}

    def evaluate(self, weights: Weights, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of actions, KL divergences from ``dist``, and entropies, ``[K, L+1, M]`` each.

        Args:
            weights: of every task, ``[K, ...]``.
            rows: ``obs``, ``action``, ``dist`` and, if present, ``action_mask``; ``[K, L+1, M, ...]``.
        """
        call: Callable[..., Any] = vmap(lambda w, own: functional_call(self, w, (own,)))
        return call(weights, {key: rows[key] for key in ROWS if key in rows})

    def adapted(self, weights: Weights, rows: Batch, lr: float, create_graph: bool) -> tuple[Weights, Tensor]:
        """Make one step for each task: Finn et al. 2017 (arXiv:1703.03400), equations 1 and 4.

        The surrogate is the likelihood ratio to the policy that acted times the advantage. Its first derivative is the
        policy gradient; the derivative of the step has the terms of the sampling distribution (Rothfuss et al. 2018,
        arXiv:1810.06784, section 4).

        Args:
            weights: of every task, ``[K, ...]``.
            rows: as for ``evaluate``, with ``logp``, ``advantage`` and ``valid``, ``[K, L+1, M]``.
            lr: size of the step.
            create_graph: keep the graph of the step, for second-order gradients; else it is a constant.

        Returns:
            New weights ``[K, ...]``, and the mean divergence of the old ones from the policy that acted, ``[K]``.
        """
        logp, kl, _ = self.evaluate(weights, rows)
        gain = task_mean((logp - rows["logp"]).exp() * rows["advantage"], rows["valid"])
        grads: Any = torch.autograd.grad(gain.sum(), [*weights.values()], create_graph=create_graph, retain_graph=True)
        after = {name: w + lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return after, task_mean(kl, rows["valid"])

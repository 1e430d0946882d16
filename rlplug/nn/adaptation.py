"""A policy that adapts to tasks by policy-gradient steps, through which the gradient may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap  # type: ignore[attr-defined]

from rlplug.functional.meta import task_mean
from rlplug.functional.policy_gradient import clipped_surrogate
from rlplug.nn.actor_critic import Policy
from rlplug.types import Batch, Weights

ROWS = ("obs", "action", "dist", "action_mask")


class AdaptivePolicy(Policy):
    """Acts with one set of weights, and evaluates rows of K tasks with weights of their own, leaves ``[K, ...]``."""

    def forward(self, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        dist, _ = self.dist(rows, {})
        if "noise" in rows:
            action = dist.sample(rows["noise"])
            return action, dist.logp(action), dist.params
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
        return self._each(weights, {key: rows[key] for key in ROWS if key in rows})

    def sample(self, weights: Weights, rows: Batch) -> Batch:
        """Return ``action``, ``logp`` and ``dist`` of rows with ``obs`` and ``noise``; all ``[K, N, ...]``."""
        return dict(zip(("action", "logp", "dist"), self._each(weights, rows), strict=True))

    def _each(self, weights: Weights, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        call: Callable[..., Any] = vmap(lambda w, own: functional_call(self, w, (own,)))
        return call(weights, rows)

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

    def losses(
        self, rounds: Sequence[Batch], lr: float, first_order: bool, clip: float, kl_coeff: Tensor, entropy_coeff: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the objective of MAML after an adaptation to every task, through which the gradient goes.

        Args:
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
        weights, kls, last = self.initial(len(rounds[0]["valid"])), list[Tensor](), rounds[-1]
        for rows in rounds[:-1]:
            weights, kl = self.adapted(weights, rows, lr, create_graph=not first_order)
            kls.append(kl)
        logp, kl, entropy = self.evaluate(weights, last)
        gain = clipped_surrogate((logp - last["logp"]).exp(), last["advantage"], clip)
        terms = {"policy": -task_mean(gain, last["valid"])}
        if len(kl_coeff):
            terms["kl_penalty"] = (kl_coeff * torch.stack(kls, -1)).sum(-1)
        entropy = task_mean(entropy, last["valid"])
        if entropy_coeff:
            terms["entropy"] = -entropy_coeff * entropy
        metrics = {f"kl_{step}": x for step, x in enumerate(kls)} | {"kl": task_mean(kl, last["valid"])}
        return terms, {name: x.detach() for name, x in (metrics | {"mean_entropy": entropy}).items()}

"""A policy with weights of its own for every task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import functional_call, vmap  # type: ignore[attr-defined]

from rlplug.nn.actor_critic import Policy
from rlplug.nn.autoregressive import along
from rlplug.types import Batch, Weights

ROWS = ("obs", "action", "dist", "action_mask")


class AdaptivePolicy(Policy):
    """Acts with one set of weights, and evaluates rows of K tasks with weights of their own, leaves ``[K, ...]``."""

    def forward(self, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        dist, _ = self.dist(rows, {})
        if "noise" in rows:
            action = dist.sample(rows["noise"])
            dist = along(dist, action)
            return action, dist.logp(action), dist.params
        return dist.logp(rows["action"]), dist.kl_from(rows["dist"]), dist.entropy()

    def initial(self, tasks: int) -> Weights:
        """Return separate weights for every task, ``[tasks, ...]``, as views through which gradients add up."""
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

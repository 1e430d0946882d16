"""One optimizer of a trainable, and what a gradient step needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlplug.api import Optim
from rlplug.types import Tree


class OptimizerState:
    """One part of a trainable.

    Args:
        optim: as the trainable declares it.
        optimizer: the same optimizer, set up by Fabric.
    """

    def __init__(self, optim: Optim, optimizer: Any) -> None:
        self.optim, self.optimizer, self.calls = optim, optimizer, 0
        self.params: list[Tensor] = [p for group in optim.optimizer.param_groups for p in group["params"]]
        self._follow_schedule()

    def due(self) -> bool:
        """Count a call; every ``optim.every``-th is due."""
        self.calls += 1
        return self.calls % self.optim.every == 0

    def clip(self) -> Sequence[Tensor]:
        """Clip as ``torch.nn.utils`` does, which takes half as long again.

        Returns:
            Norms of the gradient before it was clipped, 0-d: one of every tensor, or one of all together.
        """
        limit = self.optim.grad_clip
        grads = [p.grad for p in self.params if p.grad is not None]
        if not grads:
            return ()
        each = torch._foreach_norm(grads)
        if limit is None:
            return each
        if self.optim.grad_clip_by == "value":
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)
            return each
        norms = torch.stack(each)
        if self.optim.grad_clip_by == "norm":
            torch._foreach_mul_(grads, list((limit / (norms + 1e-6)).clamp_(max=1.0).unbind()))
            return each
        norm = norms.norm()
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp_(max=1.0))
        return (norm,)

    def state(self) -> Tree:
        return {"optimizer": self.optim.optimizer.state_dict(), "calls": self.calls}

    def load(self, state: Tree) -> None:
        self.calls = state["calls"]
        self.optim.optimizer.load_state_dict(state["optimizer"])
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        """Let the optimizer read its step size from the schedule's tensor."""
        if self.optim.lr is not None:
            for group in self.optim.optimizer.param_groups:
                group["lr"] = self.optim.lr

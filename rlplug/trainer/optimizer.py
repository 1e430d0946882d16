"""A part of a trainable: one optimizer, and what it needs per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlplug.api import Optim
from rlplug.types import Tree


@dataclass
class OptimizerState:
    optim: Optim
    optimizer: Any  # Fabric's
    params: list[Tensor]
    calls: int = 0

    def due(self) -> bool:
        """Count a call; every ``optim.every``-th is due."""
        self.calls += 1
        return self.calls % self.optim.every == 0

    def clip(self) -> Sequence[Tensor]:
        """As ``torch.nn.utils`` clips, which takes half as long again.

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
        self.follow_schedule()

    def follow_schedule(self) -> None:
        """Let the optimizer read its step size from the schedule's tensor."""
        if self.optim.lr is not None:
            for group in self.optim.optimizer.param_groups:
                group["lr"] = self.optim.lr

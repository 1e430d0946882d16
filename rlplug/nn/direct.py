"""Deterministic policies whose weights are searched, not differentiated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import psutil
import torch
from gymnasium.spaces import Box, Discrete
from pydantic import Field
from torch import Tensor, nn

from rlplug.nn.distributions import Categorical
from rlplug.nn.heads import Draws
from rlplug.nn.module import Module
from rlplug.types import Batch, ConfigError, Mode

Candidates: TypeAlias = Annotated[int, Field(gt=0, le=2**19)]
"""number of candidates or directions; the jobs of an update have at most 2**20 numbers"""


COPIES = 64
"""copies of the weights in memory while candidates act: a batch of 32, and those of which it is made"""


def require_memory(module: nn.Module, copies: int, key: str, what: str) -> None:
    """Raise ``ConfigError`` at ``key`` unless ``copies`` of the weights of a module fit into the free memory."""
    needed, free = copies * sum(w.nbytes for w in module.parameters()), psutil.virtual_memory().available
    if needed > free:
        said = f"the weights of {copies:,} {what} would need {needed / 2**30:,.4g} GiB"
        raise ConfigError(key, f"{said}, but only {free / 2**30:,.4g} GiB are free; use fewer weights")


class DirectPolicy(Module):
    """A network with a linear layer that scores discrete actions, or outputs the continuous one, clipped to its bounds.

    Args:
        torso: model with ``out_dim``, which maps an observation to features.
        action: the space of actions, with bounds of -1 and 1 if it is continuous.
        zero: begin with a layer of zeros.

    Raises:
        ValueError: actions are neither discrete nor continuous.
        ConfigError: candidates do not fit into memory.
    """

    def __init__(self, torso: Any, action: Any, zero: bool = False) -> None:
        super().__init__()
        if not isinstance(action, Discrete | Box):
            raise ValueError(f"actions of {action}")
        self.torso, self.space = torso, action
        size = int(action.n) if isinstance(action, Discrete) else math.prod(action.shape)
        self.head = nn.Linear(torso.out_dim, size)
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        require_memory(self, COPIES, "model", "candidates that act together")

    def forward(self, step: Batch, carry: Batch) -> tuple[Tensor, Batch]:
        """Return the action of each row, ``[B, ...]``, and the carry."""
        features, carry = self.torso(step["obs"], carry, step["is_first"])
        out = self.head(features)
        if isinstance(self.space, Box):
            return out.clamp(-1.0, 1.0).unflatten(-1, self.space.shape), carry
        mask = step.get("action_mask")
        return (out if mask is None else out.masked_fill(~mask, -torch.inf)).argmax(-1), carry

    def act(self, step: Batch, carry: Batch, mode: Mode, ctx: Draws) -> tuple[Batch, Batch]:
        """Act on one row of every column: ``Algorithm.act``."""
        action, carry = self(step, carry)
        if mode == "random" and isinstance(self.space, Box):
            action = ctx.rand(*action.shape) * 2.0 - 1.0
        elif mode == "random":
            scores = torch.zeros(len(action), self.head.out_features, device=action.device)
            action = Categorical(scores, step.get("action_mask")).sample(ctx.rand(len(action), 1))
        return {"action": action}, carry


def noise_of(seed: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return standard normal noise like ``like``, leaves ``[...]``, drawn on the CPU. It depends on the seed only."""
    source = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(x.numel() for x in like.values()), generator=source)
    pieces = flat.split([x.numel() for x in like.values()])
    return {
        name: part.view(x.shape).to(x.device, x.dtype) for (name, x), part in zip(like.items(), pieces, strict=True)
    }

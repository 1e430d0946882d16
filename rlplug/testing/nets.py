"""A network of a user, for the kit."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Space
from torch import Tensor, nn


class Net(nn.Module):
    """A network of a user: one layer on the flattened observation."""

    def __init__(self, space: Space[Any], size: int = 16) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LazyLinear(size), nn.Tanh())

    def forward(self, x: Any) -> Tensor:
        """Map observations ``[n, ...]`` to features ``[n, size]``."""
        parts = x.values() if isinstance(x, dict) else [x]
        return self.layer(torch.cat([part.flatten(1) for part in parts], 1))

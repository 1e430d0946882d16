"""Running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from torch import Tensor, nn

from rlplug import tree
from rlplug.types import Tree

EPSILON = 1e-8
PIECE = 1 << 20
"""numbers summed at a time, in double precision"""


class Moments(nn.Module):
    """Running mean and variance ``[*shape]``, merged batch by batch (Chan et al. 1979).

    New data counts only after ``commit``, so that updates can use the moments with which the rollout was collected.
    """

    mean: Tensor
    var: Tensor
    seen: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.size = math.prod(shape)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("seen", torch.zeros(1 + 2 * self.size, dtype=torch.float64))  # count, mean, squares

    @torch.no_grad()
    def add(self, x: Tensor, gather: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Add ``x [n, *shape]``, this rank's shard of the data.

        Args:
            gather: ``Learner.gather``, if other ranks have shards.
        """
        x = x.reshape(len(x), self.size)
        own = torch.zeros_like(self.seen)
        for piece in x.split(max(1, PIECE // max(1, self.size))):  # limits the memory of images in double precision
            piece = piece.to(self.seen)
            own += torch.cat([piece.new_tensor([len(piece)]), piece.sum(0), piece.square().sum(0)])
        count, total, squares = gather(own[None]).sum(0).split([1, self.size, self.size])
        if not count:
            return
        mean = total / count
        before, old_mean, old_m2 = self.seen.split([1, self.size, self.size])
        shift, whole = mean - old_mean, before + count
        m2 = old_m2 + (squares - count * mean.square()).clamp(min=0.0) + shift.square() * before * count / whole
        self.seen.copy_(torch.cat([whole, old_mean + shift * count / whole, m2]))

    def commit(self) -> None:
        """Let all data added so far count from now on."""
        count, mean, m2 = self.seen.split([1, self.size, self.size])
        if count > 1:
            self.mean.copy_(mean.view(self.mean.shape))
            self.var.copy_((m2 / count).view(self.var.shape))

    def scale(self) -> Tensor:
        """Return the inverse of the standard deviation, ``[*shape]``."""
        return (self.var + EPSILON).rsqrt()


class SpaceMoments(nn.ModuleDict):
    """Running moments of every part of a space that is a vector of numbers.

    Args:
        limit: clip of normalized numbers.
    """

    def __init__(self, space: Space[Any], limit: float) -> None:
        super().__init__()
        self.limit, self.names = limit, self._names(space, "obs")

    def _names(self, space: Space[Any], name: str) -> Tree:
        """Return the name, without dots, of every part's moments; None for a part without moments."""
        if isinstance(space, Dict):
            quoted = {key: quote(key, safe="").replace(".", "%2E") for key in space.spaces}
            return {key: self._names(part, f"{name}/{quoted[key]}") for key, part in space.spaces.items()}
        if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating) and len(space.shape) < 3:
            self[name] = Moments(space.shape)
            return name
        return None

    def forward(self, x: Any) -> Any:
        """Normalize points ``[..., *space]`` of the space."""
        return tree.map(self._normalized, x, self.names)

    def _normalized(self, x: Tensor, name: str | None) -> Tensor:
        if name is None:
            return x
        moments: Any = self[name]
        mean, scale = moments.mean.to(x.device), moments.scale().to(x.device)
        return ((x - mean) * scale).clamp(-self.limit, self.limit)

    def add(self, x: Any, counts: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Add the rows ``counts [...]`` of ``x [..., *space]``; see ``Moments.add``."""
        moments: Any = self
        tree.map(lambda name, part: name and moments[name].add(part[counts], gather), self.names, x)

    def commit(self) -> None:
        """Let all data added so far count from now on."""
        moments: Any
        for moments in self.values():
            moments.commit()

"""Running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

EPSILON = 1e-8
PIECE = 1 << 20
"""so many numbers are summed up at a time, in double precision"""


class Moments(nn.Module):
    """Running mean and variance ``[*shape]``, merged batch by batch (Chan et al. 1979).

    What was seen last counts only after ``commit``: a rollout may be learned from with the moments that it was acted
    with.
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
        """Count ``x [n, *shape]``, this rank's share of what is added.

        Args:
            gather: ``Learner.gather``, where there are other shares.
        """
        x = x.reshape(len(x), self.size)
        own = torch.zeros_like(self.seen)
        for piece in x.split(max(1, PIECE // max(1, self.size))):  # images in double precision are many times as large
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
        """Let all that was added until now count from now on."""
        count, mean, m2 = self.seen.split([1, self.size, self.size])
        if count > 1:
            self.mean.copy_(mean.view(self.mean.shape))
            self.var.copy_((m2 / count).view(self.var.shape))

    def scale(self) -> Tensor:
        """Return one over the standard deviation, ``[*shape]``."""
        return (self.var + EPSILON).rsqrt()

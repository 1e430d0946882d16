"""Weights of candidates, from the returns of their episodes."""

from __future__ import annotations

import torch
from torch import Tensor


def centered_ranks(x: Tensor) -> Tensor:
    """Return -0.5 for the lowest of ``x [P]`` to 0.5 for the highest; equal values share the mean of their ranks.

    Salimans et al. 2017 (arXiv:1703.03864), section 2.1. If all are equal, all ranks are 0.
    """
    below, up_to = (x[:, None] > x).sum(1), (x[:, None] >= x).sum(1)
    return ((below + up_to - 1) / 2 / max(len(x) - 1, 1) - 0.5).to(x.dtype)


def mirrored_gradient(positive: Tensor, negative: Tensor, noise_stdev: float) -> Tensor:
    """Return each direction's weight ``[n]`` in the gradient of the expected fitness of its two candidates.

    Salimans et al. 2017, algorithm 2, with mirrored samples: ``(F+ - F-) / (2 n sigma)``.
    """
    return (positive - negative) / (2 * len(positive) * noise_stdev)


def ars_weights(positive: Tensor, negative: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Return the indices ``[used]`` of the best directions by ``max(r+, r-)``, and their weights in the step.

    Mania et al. 2018 (arXiv:1803.07055), algorithm 2: ``(r+ - r-) / (b sigma_R)``, with the standard deviation of the
    ``2 b`` returns that are used. Directions with equal returns are in their order.
    """
    best = torch.maximum(positive, negative).argsort(descending=True, stable=True)[:used]
    own = torch.stack([positive[best], negative[best]])
    return best, (own[0] - own[1]) / (used * own.std(correction=0) + 1e-6)


def elite(x: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` highest of ``x [P]``, equal values in their order."""
    return x.argsort(descending=True, stable=True)[:count]

"""Distributions of returns over a fixed support."""

from __future__ import annotations

import torch
from torch import Tensor


def project(prob: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Project a distribution onto the support: Bellemare et al. 2017 (arXiv:1707.06887), equation 7.

    Atoms outside the support are clipped to its ends; the mass of an atom between two points is split between them in
    inverse proportion to its distance. An atom on a point gives it all of its mass, so the total is preserved.

    Args:
        prob: ``[..., K]``, mass of each atom.
        atoms: ``[..., K]``, their positions.
        support: ``[N]``, at least two points, evenly spaced and increasing.

    Returns:
        Mass of each point of the support, ``[..., N]``.
    """
    first, last = support[0], support[-1]
    place = (atoms.clamp(first, last) - first) / ((last - first) / (len(support) - 1))
    below = place.floor().clamp(max=len(support) - 2)
    share, index = (place - below).clamp(max=1.0), below.long()  # rounding may exceed the last point
    mass = prob.new_zeros(*prob.shape[:-1], len(support))
    return mass.scatter_add(-1, index, prob * (1.0 - share)).scatter_add(-1, index + 1, prob * share)


def kl_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return ``KL(target || softmax(logits))``, Rainbow's loss: Hessel et al. 2018 (arXiv:1710.02298), section 3.

    Its gradient equals that of C51's cross-entropy, and it is 0 if the prediction equals the target.

    Args:
        target: ``[..., K]``, probabilities, possibly zero.
        logits: ``[..., K]``.

    Returns:
        ``[...]``.
    """
    return (torch.xlogy(target, target) - target * logits.log_softmax(-1)).sum(-1)

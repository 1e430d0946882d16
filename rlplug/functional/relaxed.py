"""Relaxed samples of categorical distributions, through which gradients flow."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.functional.td import forbid


def gumbel(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1), ``[...]``, into finite standard Gumbel noise."""
    tiny = torch.finfo(uniform.dtype).tiny
    return -(-uniform.clamp_min(tiny).log()).clamp_min(tiny).log()


def one_hot_max(logits: Tensor) -> Tensor:
    """Return the one-hot vector ``[..., A]`` of the largest of ``logits [..., A]``, of the same dtype.

    With Gumbel noise on the logits it is an exact sample: Gumbel 1954.
    """
    return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)


def relaxed_one_hot(
    logits: Tensor, temperature: float, straight_through: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Return ``softmax(logits / temperature)`` of perturbed ``logits [..., A]``: the Gumbel-softmax sample.

    Source: Jang et al. 2017 (arXiv:1611.01144), equation 2, and section 2.2 for the straight-through estimator.

    Args:
        logits: ``[..., A]``, with Gumbel noise added.
        temperature: towards 0 the sample becomes one-hot.
        straight_through: the value is one-hot, the gradient that of the relaxed sample.
        mask: ``[..., A]`` bool, the allowed actions; None: all.
    """
    soft = forbid(logits / temperature, mask).softmax(-1)
    return soft + (one_hot_max(soft) - soft).detach() if straight_through else soft

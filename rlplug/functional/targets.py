"""Target networks."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

Parameters: TypeAlias = nn.Module | list[Tensor]


def polyak_(target: Parameters, source: Parameters, tau: float) -> None:
    """Move ``target`` to ``(1 - tau) * target + tau * source``: Lillicrap et al. 2016 (arXiv:1509.02971), algorithm 1.

    Args:
        target: parameters that follow, or a module; collecting a module's parameters may take
            longer than moving them, so a hot loop may keep the two lists.
        source: the parameters to follow, in the same order.
        tau: step; 1 copies.
    """
    with torch.no_grad():
        torch._foreach_lerp_(_tensors(target), _tensors(source), tau)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _tensors(of: Parameters) -> list[Tensor]:
    return list(of.parameters()) if isinstance(of, nn.Module) else of

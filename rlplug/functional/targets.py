"""Target networks."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from rlplug import host

Parameters: TypeAlias = nn.Module | list[Tensor]


def polyak_(target: Parameters, source: Parameters, tau: float, due: Tensor | None = None) -> None:
    """Set ``target`` to ``(1 - tau) * target + tau * source``: Lillicrap et al. 2016 (arXiv:1509.02971), algorithm 1.

    Args:
        target: parameters to update, or a module; collecting a module's parameters may take longer than
            updating them, so a hot loop may pass lists.
        source: the parameters to track, in the same order.
        tau: step; 1 copies.
        due: 0-d, bool; False leaves ``target`` unchanged. The CPU does not wait for a device's value.
    """
    with torch.no_grad():
        if due is None or host.reads_freely(due):
            if due is None or due:
                torch._foreach_lerp_(_tensors(target), _tensors(source), tau)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return
        for x, y in zip(_tensors(target), _tensors(source), strict=True):
            x.copy_(torch.where(due, torch.lerp(x, y, tau), x))


def _tensors(of: Parameters) -> list[Tensor]:
    return list(of.parameters()) if isinstance(of, nn.Module) else of

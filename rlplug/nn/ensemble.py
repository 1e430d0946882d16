"""Ensembles of models without a batched implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.nn.module import Module
from rlplug.types import Batch


class Ensemble(Module):
    """Independently built models (``rlplug.api.Model``) that process the same input one after the other.

    Features are stacked on a leading axis, ``[E, ..., out_dim]``. The carry is a dict of the members' carries
    by number, so its leaves keep their leading ``[n, ...]``.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.out_dim: int = self.members[0].out_dim  # type: ignore[assignment]

    def initial_carry(self, n: int) -> Batch:
        """Return the recurrent state of ``n`` columns; empty if the members have none."""
        carries: dict[str, Any] = {str(i): member.initial_carry(n) for i, member in enumerate(self.members)}  # type: ignore[operator]
        return {name: carry for name, carry in carries.items() if carry}

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        out = {str(i): member(x, carry.get(str(i), {}), is_first) for i, member in enumerate(self.members)}
        features = torch.stack([features for features, _ in out.values()])
        return features, {name: carry for name, (_, carry) in out.items() if carry}

"""Fabric's replacement in runs with a single rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T")


class OneProcess:
    """The used methods of ``lightning.fabric.Fabric`` for a single rank, without its import of seconds."""

    global_rank = local_rank = 0
    world_size = 1
    is_global_zero = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def broadcast(self, x: T) -> T:
        return x

    def all_gather(self, x: Any) -> Any:
        return x[None]

    def barrier(self) -> None:
        """Return immediately."""

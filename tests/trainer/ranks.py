"""Runs a function on several gloo ranks; the functions live in importable modules because ranks are spawned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric


def one_rank() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def _call(fabric: Fabric, function: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.save(function(fabric, *args), Path(folder) / f"{fabric.global_rank}.pt")
    fabric.barrier()
    torch.distributed.destroy_process_group()  # a rank that leaves while gloo's threads run may abort


def on_ranks(n: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What ``function(fabric, *args)`` returns on each of ``n`` ranks."""
    fabric = Fabric(accelerator="cpu", devices=n, strategy="ddp_spawn")
    fabric.launch(_call, function, str(folder), args)
    return [torch.load(folder / f"{rank}.pt") for rank in range(n)]

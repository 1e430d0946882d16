"""A collected segment for tests of actor-critics, made by their own ``act``."""

from __future__ import annotations

import torch

from rlplug import tree
from rlplug.api import Algorithm
from rlplug.types import Batch

T, B = 16, 4


def segment(algorithm: Algorithm, mask: torch.Tensor | None = None) -> Batch:
    """What was collected: two columns have an episode that ends within, column 0 begins within one."""
    g = torch.Generator().manual_seed(1)
    obs = torch.randn(T + 1, B, 3, generator=g)
    batch = {"obs": obs, "reward": obs[..., 0] + 1.0}
    for key in ("terminated", "truncated", "is_first"):
        batch[key] = torch.zeros(T + 1, B, dtype=torch.bool)
    batch["valid"] = ~batch["is_first"]
    batch["valid"][-1] = batch["valid"][5, 2] = batch["valid"][9, 3] = False
    batch["truncated"][4, 2] = batch["terminated"][8, 3] = True
    batch["is_first"][0, 1:] = batch["is_first"][6, 2] = batch["is_first"][10, 3] = True
    if mask is not None:
        batch["action_mask"] = mask
    with torch.no_grad():
        carry = tree.map(lambda x: torch.randn(x.shape, generator=g), algorithm.initial_carry(B))
        out = []
        for t in range(T + 1):
            step = {key: batch[key][t] for key in ("obs", "is_first", "action_mask") if key in batch}
            said, after = algorithm.act(step, carry, "explore")
            out.append(said | ({"carry": carry} if carry else {}))
            carry = after
    return batch | stacked(out)


def stacked(rows: list[Batch]) -> Batch:
    return tree.map(lambda *x: torch.stack(x), *rows)


def move(algorithm: Algorithm, by: float = 0.05) -> None:
    """Change the weights, as updates do between collection and learning."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in algorithm.parameters():
            p += by * torch.randn(p.shape, generator=g)

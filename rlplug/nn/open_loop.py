"""What a world model imagines of recorded rows if it sees only the first half of them, and then only the actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.nn.rssm import Decoder
from rlplug.types import Batch

States = tuple[Tensor, Tensor]
"""deterministic and stochastic ones"""
MOST_COLUMNS = 6
"""sequences in a picture"""


def open_loop(
    observe: Callable[[Batch, Batch], Batch],
    imagine: Callable[[Tensor, Tensor, Tensor], States],
    batch: Batch,
    action: Tensor,
) -> States:
    """Return the states ``[T, B, ...]`` of a sample: the first half is seen, the rest is imagined.

    Args:
        observe: maps rows ``[T / 2, B, ...]`` and the carry before them to their ``deter`` and ``stoch``.
        imagine: maps a state ``[B, ...]`` and the action after it, ``[B, A]``, to the next state.
        batch: ``obs``, ``prev_action`` and ``is_first``, ``[T, B, ...]``, and ``carry [1, B, ...]``.
        action: ``prev_action`` encoded, ``[T, B, A]``.
    """
    half = len(action) // 2
    rows = tree.take({key: batch[key] for key in ("obs", "prev_action", "is_first")}, slice(half))
    seen = observe(rows, tree.take(batch["carry"], 0))
    states = [*zip(seen["deter"], seen["stoch"], strict=True)]
    for row in action[half:]:
        states.append(imagine(*states[-1], row))
    deter, stoch = zip(*states, strict=True)
    return torch.stack(deter), torch.stack(stoch)


def open_loop_errors(decoder: Decoder, states: States, reward: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return the mean losses of decoder and reward on imagined rows, up to the end of their episode, 0-d each.

    Args:
        reward: predicted, ``[T, B]``.
    """
    half = len(reward) // 2
    counts = batch["is_first"][half:].cumsum(0) == 0
    errors = decoder.loss(*states, batch["obs"]) | {"reward": (reward - batch["reward"]).square()}
    return {f"open_loop_{key}": (x[half:] * counts).sum() / counts.sum().clamp(min=1) for key, x in errors.items()}


def open_loop_pictures(decoder: Decoder, states: States, obs: Any) -> Tensor | None:
    """Return real images, decoded ones and their difference, one below the other, ``[T, H, W, 3]`` uint8.

    None if observations have no images.
    """
    images, _ = decoder(*states)
    real, _ = decoder.split(obs)
    if images is None or real is None:
        return None
    shown = torch.cat((real, images, (images - real + 1.0) / 2.0), 2).unflatten(0, states[0].shape[:2])
    shown = shown[:, :MOST_COLUMNS].movedim(1, 3).flatten(3)[:, :3]  # [T, C, 3 H, columns * W]
    return (255.0 * shown.expand(-1, 3, -1, -1).movedim(1, -1)).round().to(torch.uint8)

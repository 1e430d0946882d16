"""Samples: check one against an algorithm's needs, and draw one for pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Needs
from rlplug.types import Batch, groups_of


def sample_misfit(batch: Batch, needs: Needs) -> str | None:
    """Return what is wrong with a sample, as text that follows the name of its source, or None."""
    groups = [part for part in batch.values() if isinstance(part, dict)]  # groups of agents have their own rewards
    if missing := [key for key in ("reward", "valid") if not any(key in part for part in (batch, *groups))]:
        return f"returned no {', '.join(missing)}; a sample has every key that was added"
    if needs.data == "windows":
        if missing := [key for key in ("index", "sample_prob") if key not in batch]:
            return f"returned no {', '.join(missing)}; return it for every column, [B]"
        if len(batch["valid"]) != (window := needs.window).rows:
            warm = f"{window.burn_in} of burn-in and " * bool(window.burn_in)
            parts = f"{warm}{window.length} of the window, and one more"
            return f"returned {len(batch['valid'])} rows; return {window.rows}: {parts}"
    short = [key for key in needs.keys if key in batch and key != "carry" and not isinstance(batch[key], dict)]
    for key in ("reward", "terminated", "truncated", *short):
        leaf = batch.get(key)
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] != batch["valid"].shape:
            return f"returned {key} of {[*leaf.shape[:2]]} rows and columns; valid has {[*batch['valid'].shape]}"
    return None


def bonus_misfit(returned: Any, batch: Batch) -> str | None:
    """Return what is wrong with intrinsic rewards of a sample, as ``sample_misfit``."""
    parts, given = groups_of(batch), returned if isinstance(returned, dict) else {"": returned}
    if returned is not None and not given.keys() <= parts.keys():
        return f"returned {tree.what(returned)}; return a dict with a reward of every row for {' or '.join(parts)}"
    for name, x in given.items() if returned is not None else ():
        shape = [*parts[name]["reward"].shape]
        if not isinstance(x, Tensor) or [*x.shape] != shape:
            got = f"rewards of shape {[*x.shape]}" if isinstance(x, Tensor) else tree.what(x)
            return f"returned {got}; return a reward for every row of the sample, {shape}"
    return None


def predictions(
    algorithm: Algorithm, buffer: Buffer, ctx: Any, normalized: Callable[[Batch], Batch]
) -> NDArray[Any] | None:
    """Return ``Algorithm.pictures`` of a sample, ``[n, H, W, 3]``; the run's later samples do not change.

    Args:
        ctx: the run's context, with its generators and device.
        normalized: maps a sample to what ``prepare`` gets.
    """
    if type(algorithm).pictures is Algorithm.pictures or not buffer.ready():
        return None
    states = [(generator, generator.get_state()) for generator in ctx.generators.values()]
    with torch.no_grad():
        shown = algorithm.pictures(normalized(tree.map(lambda x: x.to(ctx.device), buffer.sample())))
    for generator, state in states:
        generator.set_state(state)
    return None if shown is None else shown.cpu().numpy()

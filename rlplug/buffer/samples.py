"""Check a sample against an algorithm's needs."""

from __future__ import annotations

from torch import Tensor

from rlplug.api import Needs
from rlplug.types import Batch


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

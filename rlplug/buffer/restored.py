"""Checks of rows that a checkpoint held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlplug import tree
from rlplug.types import Batch

IMAGES = {"frame", "block", "length", "back"}
"""keys of encoded images"""


def like_collected(row: Batch, saved: Any) -> Any:
    """Return a buffer's saved tree, if the rows in it, at any depth, have the layout of collected rows.

    Args:
        row: what is collected, leaves ``[B, ...]``.

    Raises:
        ValueError: they lack a key, or differ in the kind of a dtype or in a shape beyond the axes of ``valid``.
    """
    parts: Any = saved if isinstance(saved, list | tuple) else ()
    for part in saved.values() if isinstance(saved, dict) else parts:
        like_collected(row, part)
    if isinstance(saved, dict) and "valid" in saved:
        _check_stored(row, saved, saved["valid"].shape)
    return saved


def _check_stored(row: Any, saved: Any, axes: Sequence[int]) -> None:
    if missing := row.keys() - saved.keys() - {"carry"}:
        raise ValueError(f"the saved rows lack {', '.join(sorted(missing))}")
    for key in row.keys() & saved.keys() - {"carry"}:
        like, leaf = row[key], saved[key]
        if isinstance(like, dict):
            _check_stored(like, leaf, axes)
        elif not hasattr(leaf, "keys") or not leaf.keys() <= IMAGES:
            kinds = {(x.is_floating_point(), x.is_complex(), x.dtype == torch.bool) for x in (like, leaf)}
            if len(kinds) > 1 or leaf.shape != (*axes, *like.shape[1:]):
                raise ValueError(f"the saved {key} is {tree.what(leaf)}, unlike that which is collected")

"""Checks of rlplug's own files: descriptions of columns, and the stream rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlplug.spaces import Hybrid
from rlplug.types import Batch, EnvSpec, groups_of

DTYPES = frozenset({"bool", *(f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64))})
DTYPES |= {"float16", "float32", "float64"}
DEPTH = 16  # maximum depth of names
ELEMENTS = 2**26  # maximum elements of a row


def check_leaves(leaves: Any) -> None:
    """Check a file's description of its columns: names, types and shapes.

    Raises:
        ValueError: it is invalid.
    """
    paths = set[tuple[str, ...]]()
    for leaf in leaves if isinstance(leaves, list) else ():
        match leaf:
            case {"path": [_, *_] as path, "dtype": str() as dtype, "shape": list() as shape}:
                names = len(path) <= DEPTH and all(isinstance(name, str) for name in path)
                sizes = all(type(size) is int and size >= 0 for size in shape)
                if names and sizes and dtype in DTYPES and np.prod([float(size) for size in shape]) <= ELEMENTS:
                    paths.add((*path,))
    if not paths or len(paths) != len(leaves):
        raise ValueError("its description of its columns is damaged")
    if missing := {("valid",), ("is_first",)} - paths:
        raise ValueError(f"it has no key {min(missing)[0]!r}")
    if any(path[:i] in paths for path in paths for i in range(1, len(path))):
        raise ValueError("its description of its columns is damaged")


def put(rows: Batch, path: Sequence[str], leaf: np.ndarray) -> None:
    """Insert a column at the path of its name."""
    *parents, name = path
    for parent in parents:
        rows = rows.setdefault(parent, {})
    rows[name] = leaf


def check_stream(rows: Batch, steps: np.ndarray, spec: EnvSpec | None) -> None:
    """Check that rows are whole episodes in their spaces.

    Args:
        rows: leaves ``[sum(steps + 1), ...]``.
        steps: steps of each episode.

    Raises:
        ValueError: they are not.
    """
    finals = np.cumsum(steps + 1) - 1
    valid = np.ones(finals[-1] + 1 if len(finals) else 0, np.bool_)
    valid[finals] = False
    expected, groups = {"valid": valid, "is_first": np.roll(~valid, 1)}, groups_of(rows)
    for key, flags in expected.items():
        if rows[key].shape != flags.shape or (rows[key] != flags).any():
            raise ValueError(f"its column {key!r} does not match its episodes")
    if spec is None:
        return
    for name, group in spec.groups.items():
        part = groups.get(name if spec.nested else "")
        if part is None:
            raise ValueError(f"it has no rows of {name!r}")
        for key in ("terminated", "truncated", "reward", "obs", "action"):
            if key not in part:
                raise ValueError(f"it has no key {key!r}")
        if not spec.has_agents:
            over = (part["terminated"] | part["truncated"]).reshape(-1)
            if over.shape != valid.shape or (over != np.roll(~valid, -1)).any():
                raise ValueError("its ends do not match its episodes")
        _check(part["obs"], group.obs, len(group.agents), "observations")
        _check(part["action"], group.action, len(group.agents), "actions")


def _check(leaf: Any, space: spaces.Space[Any], agents: int, what: str) -> None:
    """Check the shape of rows against an internal space, and the range of discrete values."""
    if isinstance(space, spaces.Dict):
        if not isinstance(leaf, dict) or leaf.keys() != space.spaces.keys():
            raise ValueError(f"its {what} have different parts than its spaces")
        for key, part in space.spaces.items():
            _check(leaf[key], part, agents, what)
        return
    shape = ((agents,) if agents else ()) + (space.shape or ())
    if isinstance(leaf, dict) or leaf.shape[1:] != shape:
        raise ValueError(f"its {what} have a different shape than its spaces")
    if isinstance(space, Hybrid):
        numbers, chosen = leaf[..., : space.size], leaf[..., space.size :]
        if leaf.dtype.kind != "f" or (chosen != np.floor(chosen)).any():
            raise ValueError(f"its {what} do not match its spaces")
        _check(numbers, space.continuous, agents, what)
        space, leaf = space.discrete, chosen.astype(np.int64)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and leaf.size:
        most: Any = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if leaf.dtype.kind not in "iu" or (leaf < 0).any() or (leaf >= most).any():
            raise ValueError(f"its {what} do not match its spaces")

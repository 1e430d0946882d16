"""Environments with agents: what their rows keep to."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.testing.checks.runs import require
from rlplug.types import Batch, EnvSpec, groups_of

OUTCOMES = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}


def check_row(spec: EnvSpec, row: Batch, columns: int, acted: bool) -> None:
    """Check keys, shapes and types of a row; one that was not ``acted`` on the row before has no outcomes."""
    parts = {name: row.get(name, {}) for name in spec.nested} or {"": row}
    missing = [key for key in (*spec.nested, *spec.extras) if key not in row]
    require(not missing, f"a row lacks {', '.join(missing)}")
    for (name, part), group in zip(parts.items(), spec.groups.values(), strict=True):
        who, shape = f"{name}." if name else "", (columns, len(group.agents)) if group.agents else (columns,)
        for key, dtype in {"alive": np.bool_, **(OUTCOMES if acted else {})}.items():
            require(key in part, f"a row lacks {who}{key!r}")
            leaf = part[key]
            require(leaf.shape == shape, f"{who}{key} has shape {leaf.shape}; wanted {shape}")
            require(leaf.dtype == dtype, f"{who}{key} is {leaf.dtype}; wanted {np.dtype(dtype)}")
        require("obs" in part, f"a row lacks {who}'obs'")
        flat = tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(shape) :]), part["obs"])  # noqa: B023
        for i in range(int(np.prod(shape))):
            one = tree.take(flat, i)
            require(group.obs.contains(one), f"{who}obs is outside of {group.obs}, such as {one}")
        require(not acted or np.isfinite(part["reward"]).all(), f"a {who}reward is not finite")


def check_agents(env: VecEnv, rows: Any, columns: int) -> None:
    """Check that agents take part until they end, and that a column without any begins an episode at the next step."""
    spec, before, ends = env.spec, None, 0
    length = np.zeros(columns, np.int64)
    for row, action in rows:
        check_row(spec, row, columns, action is not None)
        parts = groups_of(row)
        alive = {name: part["alive"].reshape(columns, -1) for name, part in parts.items()}
        going = np.concatenate([*alive.values()], 1).any(1)
        if before is None:
            require(going.all(), "behind a reset nobody is alive")
        else:
            played = np.concatenate([*before.values()], 1).any(1)
            require(going[~played].all(), "the step behind the end of a column is its reset, but nobody is alive then")
            length = np.where(played, length + 1, 0)
            for name, part in parts.items():
                who = f" of {name}" if name else ""
                ended = (part["terminated"] | part["truncated"]).reshape(columns, -1)
                require(not (ended & ~before[name]).any(), f"an agent{who} ends that was not alive")
                left = before[name] & ~alive[name]
                require(
                    (left == ended).all(), f"'alive' of an agent{who} falls where it neither ended, or stays behind it"
                )
            ends += int((played & ~going).sum())
        if spec.max_episode_steps:
            require((length <= spec.max_episode_steps).all(), f"an episode exceeds {spec.max_episode_steps} steps")
        before = alive
    require(
        ends or not spec.max_episode_steps, f"no episode ended, although max_episode_steps is {spec.max_episode_steps}"
    )

"""Episodes of other libraries' files: transitions under other names, in the environment's own spaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlplug import tree
from rlplug.data.source import Reading, refused
from rlplug.envs.spaces import inside_action, observe
from rlplug.types import Batch

NAMES: Mapping[str, tuple[str, ...]] = {
    "obs": ("obs", "observations", "observation"),
    "next_obs": ("next_obs", "new_obs", "next_observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminateds", "terminations", "terminals"),
    "done": ("dones", "done"),  # by a terminal state or a limit, where another column tells limits
    "truncated": ("truncated", "truncateds", "truncations", "timeouts"),
    "logp": ("logp", "action_logp", "action_log_probs"),
    "action_mask": ("action_mask",),
    "next_action_mask": ("next_action_mask", "new_action_mask"),
    "episode": ("episode", "eps_id", "episode_id"),
}
"""what rlplug, RLlib, Minari and D4RL call a column"""
CALLED = {other: name for name, others in NAMES.items() for other in others}
NEEDED = ("obs", "action", "reward")


def named(columns: Mapping[str, Any], path: Path) -> Batch:
    """Return columns by rlplug's names; ``observations/position`` and ``observations.position`` are a part of one.

    Raises:
        ConfigError: there is no observation, action or reward, or nothing that says where episodes end.
    """
    found: Batch = {}
    for key, leaf in columns.items():
        name, *inner = key.replace("/", ".").split(".")
        if name not in CALLED:
            continue
        if not inner:
            found[CALLED[name]] = leaf
            continue
        part = found.setdefault(CALLED[name], {})
        for step in inner[:-1]:
            part = part.setdefault(step, {})
        part[inner[-1]] = leaf
    have = ", ".join(columns)
    for key in NEEDED:
        if key not in found:
            raise refused(path, f"has no column for {key!r} ({', '.join(NAMES[key])}); it has {have}")
    done, truncated = found.pop("done", None), found.get("truncated")
    if done is not None and "terminated" not in found:
        found["terminated"] = done if truncated is None else _flags(done) & ~_flags(truncated)
    if not {"terminated", "truncated", "episode"} & found.keys():
        ends = ", ".join(NAMES["terminated"] + NAMES["truncated"] + NAMES["done"])
        raise refused(path, f"does not say where episodes end ({ends}); it has {have}")
    return found


def check_rows(columns: Batch, n: int, final: int = 0) -> None:
    """Check that columns go together.

    Args:
        n: transitions.
        final: observations behind the last of them.

    Raises:
        ValueError: one is of another length, or a reward is not a finite number.
    """
    for key, leaf in tree.items(columns):
        if len(leaf) != n + (final if key[0] == "obs" else 0):
            raise ValueError(f"has {len(leaf)} rows of {'.'.join(key)!r}, and {n} of 'reward'")
    if not np.isfinite(np.asarray(columns["reward"][:n], np.float64)).all():
        raise ValueError("has a reward that is not a finite number")


def cut(ended: np.ndarray, episode: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Yield where episodes begin and end, of transitions ``[n]``: behind an end, or where their number changes."""
    after = ended.copy()
    if episode is not None and len(episode):
        after[:-1] |= episode[1:] != episode[:-1]
    stops = (np.flatnonzero(after) + 1).tolist()
    if len(ended) and (not stops or stops[-1] != len(ended)):
        stops.append(len(ended))
    yield from zip([0, *stops], stops, strict=False)


def ends(columns: Batch, n: int) -> np.ndarray:
    """Return which of ``n`` transitions end an episode."""
    over = np.zeros(n, np.bool_)
    for key in ("terminated", "truncated"):
        if key in columns:
            over |= _flags(columns[key][:n])
    return over


def _flags(column: Any) -> np.ndarray:
    return np.asarray(column[:]).astype(np.bool_).reshape(-1)


def length_of(steps: int, ended: bool, terminated: bool, has_next: bool, reading: Reading, where: str) -> int:
    """Return the steps that are kept of an episode, 0 if none are.

    Where a file has no final observation, an episode that goes on behind its last transition is truncated one earlier.

    Raises:
        ConfigError: it has no end, and such episodes are refused.
    """
    if not ended and reading.unfinished != "truncate":
        if reading.unfinished == "refuse":
            said = "has no end; data.unfinished=truncate ends it there, data.unfinished=skip leaves it out"
            raise refused(Path(where), said)
        reading.notes.append(f"{where} is left out: it has no end")
        return 0
    return steps if has_next or terminated else steps - 1


def stream(columns: Batch, steps: int, reading: Reading, path: Path) -> Batch:
    """Return the rows ``[steps + 1, ...]`` of one episode.

    Args:
        columns: of its transitions, ``[n, ...]``; ``obs`` may have the final observation, too.
        steps: how many of them are kept, see ``length_of``.

    Raises:
        ConfigError: they are not of the run's spaces.
    """
    if reading.spec is not None:
        (group,) = (reading.spec.native_spaces or reading.spec.groups).values()
        for key in ("obs", "next_obs"):
            if key in columns:
                _check("observations", columns[key], group.obs, path)
    obs, n = columns["obs"], steps + 1
    if len(next(tree.leaves(obs))) >= n:
        obs = tree.take(obs, slice(0, n))
    else:
        last = columns.get("next_obs", obs)
        final = tree.take(last, slice(steps - 1, steps))
        obs = tree.map(
            lambda a, b: np.concatenate((np.asarray(a), np.asarray(b))), tree.take(obs, slice(0, steps)), final
        )
    action = columns["action"]
    rows: Batch = {"obs": obs, "action": action, "reward": np.asarray(columns["reward"], np.float32).reshape(-1)}
    flags = {
        key: np.asarray(columns.get(key, np.zeros(steps)), np.bool_).reshape(-1) for key in ("terminated", "truncated")
    }
    for key, leaf in (rows | flags).items():
        if key != "obs":
            rows[key] = _padded(np.asarray(leaf), steps)
    if not (rows["terminated"][steps - 1] or rows["truncated"][steps - 1]):
        rows["truncated"][steps - 1] = True
    rows["truncated"] &= ~rows["terminated"]
    for key in ("logp", "action_mask"):
        if key in columns:
            rows[key] = _padded(np.asarray(columns[key], np.float32 if key == "logp" else np.bool_), steps)
    if "action_mask" in rows:  # behind a final observation nobody acts, but it may be bootstrapped from
        rows["action_mask"][steps] = columns["next_action_mask"][steps - 1] if "next_action_mask" in columns else True
    rows["is_first"], rows["valid"] = np.arange(n) == 0, np.arange(n) < steps
    return inside(rows, reading, path)


def _padded(leaf: np.ndarray, steps: int) -> np.ndarray:
    return np.concatenate((leaf[:steps], np.zeros((1, *leaf.shape[1:]), leaf.dtype)))


def inside(rows: Batch, reading: Reading, path: Path) -> Batch:
    """Return rows in the spaces that rlplug sees inside.

    Raises:
        ConfigError: they are not of the run's spaces.
    """
    if reading.spec is None:
        return rows
    (group,) = (reading.spec.native_spaces or reading.spec.groups).values()
    rows = rows | {"obs": tree.map(np.ascontiguousarray, observe(group.obs)(_ordered(rows["obs"], group.obs)))}
    action, space = rows["action"], group.action
    if isinstance(space, spaces.Discrete) and action.ndim == 2 and action.shape[1] == 1:
        action = action[:, 0]
    _check("actions", action, space, path)
    rows["action"] = own_actions(action, space, reading.normalized_actions)
    if "logp" in rows and isinstance(space, spaces.Box) and space.is_bounded() and not reading.normalized_actions:
        rows["logp"] = rows["logp"] + np.log(_half_range(space)).sum(dtype=np.float32)  # the density inside [-1, 1]
    return rows


def own_actions(action: np.ndarray, space: spaces.Space[Any], normalized: bool) -> np.ndarray:
    """Return actions ``[n, ...]`` of a space as rlplug has them: the inverse of ``envs.spaces.execute``."""
    dtype: Any = inside_action(space).dtype
    if isinstance(space, spaces.Box):
        if normalized or not space.is_bounded():
            return action.astype(dtype)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return ((action - (high + low) / 2) / _half_range(space)).astype(dtype)
    return (action - getattr(space, "start", 0)).astype(dtype)


def _half_range(space: spaces.Box) -> np.ndarray:
    return np.maximum((space.high.astype(np.float64) - space.low.astype(np.float64)) / 2, 1e-12)


def _ordered(obs: Any, space: spaces.Space[Any]) -> Any:
    """Return the parts of a Tuple by their numbers, which Minari calls ``_index_0``."""
    if isinstance(space, spaces.Tuple) and isinstance(obs, dict):
        return [_ordered(obs.get(f"_index_{i}", obs.get(str(i))), part) for i, part in enumerate(space.spaces)]
    if isinstance(space, spaces.Dict):
        return {key: _ordered(obs[key], part) for key, part in space.spaces.items()}
    return obs


def _check(what: str, leaf: Any, space: spaces.Space[Any], path: Path) -> None:
    """Check the kind and shape of rows against a space, and of numbers that choose, their range."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = (
            space.spaces if isinstance(space, spaces.Dict) else {f"_index_{i}": s for i, s in enumerate(space.spaces)}
        )
        have = {*leaf} if isinstance(leaf, dict) else set[str]()
        for key, part in parts.items():
            other = key.removeprefix("_index_")
            if key not in have and other not in have:
                raise refused(path, f"has no {key!r} in its {what}, which env has: {space}")
            _check(f"{what}.{other}", leaf[key] if key in have else leaf[other], part, path)
        return
    if isinstance(leaf, dict):
        raise refused(path, f"has {what} of several parts ({', '.join(leaf)}), and those of env are {space}")
    shape = space.shape or ()
    if leaf.shape[1:] != shape:
        raise refused(path, f"has {what} of shape {[*leaf.shape[1:]]}, and those of env are {space}")
    if not isinstance(space, spaces.Box) and len(leaf):
        if not np.array_equal(leaf, np.floor(leaf)):
            raise refused(path, f"has {what} that are no whole numbers, and those of env are {space}")
        low = getattr(space, "start", 0)
        n: Any = space.nvec if isinstance(space, spaces.MultiDiscrete) else getattr(space, "n", 2)
        high = low + (2 if isinstance(space, spaces.MultiBinary) else n)
        if np.any(leaf < low) or np.any(leaf >= high):
            raise refused(path, f"has {what} from {leaf.min()} to {leaf.max()}, and those of env are {space}")

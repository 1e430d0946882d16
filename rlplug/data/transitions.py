"""Conversion of other libraries' transitions, with their names and native spaces, to episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlplug import tree
from rlplug.data.source import Reading, refused
from rlplug.envs.spaces import inside_action, observe
from rlplug.types import Batch, EnvSpec, Group

NAMES: Mapping[str, tuple[str, ...]] = {
    "obs": ("obs", "observations", "observation"),
    "next_obs": ("next_obs", "new_obs", "next_observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminateds", "terminations", "terminals"),
    "done": ("dones", "done"),  # terminated or truncated, if another column marks truncation
    "truncated": ("truncated", "truncateds", "truncations", "timeouts"),
    "logp": ("logp", "action_logp", "action_log_probs"),
    "action_mask": ("action_mask",),
    "next_action_mask": ("next_action_mask", "new_action_mask"),
    "episode": ("episode", "eps_id", "episode_id"),
}
"""column names of rlplug, RLlib, Minari and D4RL"""
CALLED = {other: name for name, others in NAMES.items() for other in others}
NEEDED = ("obs", "action", "reward")
NUMBERS = "biuf"
SINGLE = ("reward", "terminated", "truncated", "done", "logp", "episode")
FINITE = ("obs", "next_obs", "action", "reward")
SAID = ("an observation", "an observation", "an action", "a reward")


def named(columns: Mapping[str, Any], path: Path) -> Batch:
    """Return columns by rlplug's names; ``observations/position`` and ``observations.position`` are nested parts.

    Raises:
        ConfigError: observations, actions, rewards or ends of episodes are missing.
    """
    found: Batch = {}
    for key, leaf in columns.items():
        name, *inner = key.replace("/", ".").split(".")
        if name not in CALLED:
            continue
        part, (*parents, last) = found, (CALLED[name], *inner)
        for step in parents:
            part = part.setdefault(step, {})
            if not isinstance(part, dict):
                raise refused(path, f"has both {step!r} and parts of it among its columns")
        if last in part and isinstance(part[last], dict):
            raise refused(path, f"has both {last!r} and parts of it among its columns")
        part[last] = leaf
    have = ", ".join(columns)
    for key in NEEDED:
        if key not in found:
            raise refused(path, f"has no key for {key!r} ({', '.join(NAMES[key])}); it has {have}")
    done, truncated = found.pop("done", None), found.get("truncated")
    if done is not None and "terminated" not in found:
        found["terminated"] = done
        if truncated is not None and np.size(done) == np.size(truncated):
            found["terminated"] = _flags(done) & ~_flags(truncated)
    if not {"terminated", "truncated", "episode"} & found.keys():
        ends = ", ".join(NAMES["terminated"] + NAMES["truncated"] + NAMES["done"])
        raise refused(path, f"does not say where episodes end ({ends}); it has {have}")
    return found


def check_rows(columns: Batch, final: int = 0) -> int:
    """Check that columns are numeric and consistent, and return the number of transitions.

    Args:
        final: number of observations after the last transition.

    Raises:
        ValueError: a column has another length, or is not numeric.
    """
    for key, leaf in tree.items(columns):
        name, first = ".".join(key), next(iter(key))
        if getattr(leaf, "dtype", np.dtype(object)).kind not in NUMBERS or not leaf.shape:
            raise ValueError(f"has no rows of numbers in {name!r}")
        if first in SINGLE and (first != name or np.prod(leaf.shape[1:]) != 1):
            raise ValueError(f"has more than one number in a row of {first!r}")
    n = len(columns["reward"])
    for key, leaf in tree.items(columns):
        if len(leaf) != n + (final if key[0] == "obs" else 0):
            raise ValueError(f"has {len(leaf)} rows of {'.'.join(key)!r}, and {n} of 'reward'")
    return n


def not_finite(columns: Batch, block: int) -> np.ndarray:
    """Return an array ``[n]`` that marks rows with numbers that are not finite in float32, the dtype of training.

    A marked row has the index of its column in ``FINITE``, plus 1; others have 0.

    Args:
        columns: leaves ``[n, ...]``; some may be shorter.
        block: rows to read at a time.
    """
    leaves = [(place, leaf) for place, key in enumerate(FINITE, 1) for leaf in tree.leaves(columns.get(key, {}))]
    found = np.zeros(max((len(leaf) for _, leaf in leaves), default=0), np.int8)
    for place, leaf in leaves:
        for low in range(0, len(leaf) if leaf.dtype.kind == "f" else 0, block):
            with np.errstate(over="ignore"):
                values = np.asarray(leaf[low : low + block]).astype(np.float32)
            found[low : low + len(values)][~np.isfinite(values).reshape(len(values), -1).all(1)] = place
    return found


def check_finite(columns: Batch, block: int = 2**16) -> None:
    """Check that observations, actions and rewards are finite.

    Raises:
        ValueError: names the first row that is not.
    """
    if len(rows := np.flatnonzero(found := not_finite(columns, block))):
        raise ValueError(f"has {SAID[found[rows[0]] - 1]} that is not a finite number, in row {rows[0]}")


def cut(ended: np.ndarray, episode: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the episodes of ``[n]`` transitions, split after ends or at a new episode number."""
    after = ended.copy()
    if episode is not None and len(episode):
        after[:-1] |= episode[1:] != episode[:-1]
    stops = (np.flatnonzero(after) + 1).tolist()
    if len(ended) and (not stops or stops[-1] != len(ended)):
        stops.append(len(ended))
    yield from zip([0, *stops], stops, strict=False)


def ends(columns: Batch, n: int) -> np.ndarray:
    """Return a mask of the ``n`` transitions that end an episode."""
    over = np.zeros(n, np.bool_)
    for key in ("terminated", "truncated"):
        if key in columns:
            over |= _flags(columns[key][:n])
    return over


def _flags(column: Any) -> np.ndarray:
    return np.asarray(column[:]).astype(np.bool_).reshape(-1)


def length_of(steps: int, ended: bool, terminated: bool, has_next: bool, reading: Reading, where: str) -> int:
    """Return the number of steps to keep of an episode, 0 to skip it.

    Without a final observation in the file, an unterminated episode is truncated one step earlier.

    Raises:
        ConfigError: it has no end, and ``unfinished`` is ``refuse``.
    """
    if not ended and reading.unfinished != "truncate":
        if reading.unfinished == "refuse":
            said = "has no end; data.unfinished=truncate truncates it, data.unfinished=skip skips it"
            if not has_next:
                said += "; nothing shows whether its rows are in order, as they have no next observations"
            raise refused(Path(where), said)
        reading.note(f"{where} is skipped: it has no end")
        return 0
    kept = steps if has_next or terminated else steps - 1
    if not kept:
        reading.note(f"{where} is skipped: it has one step and no observation after it")
    return kept


def check_observations(columns: Batch, reading: Reading, path: Path) -> None:
    """Check that the observations of a file fit the run's spaces.

    Raises:
        ConfigError: they are not.
    """
    for key in ("obs", "next_obs"):
        if key in columns and reading.spec is not None:
            _check("observations", columns[key], only_group(reading.spec, path).obs, path)


def only_group(spec: EnvSpec, path: Path) -> Group:
    """Return the native spaces of a single-agent environment.

    Raises:
        ConfigError: it has several agents.
    """
    if spec.has_agents:
        raise refused(path, "has rows of one agent, but env has several")
    (group,) = (spec.native_spaces or spec.groups).values()
    return group


def stream(columns: Batch, steps: int, reading: Reading, path: Path) -> Batch:
    """Return the rows ``[steps + 1, ...]`` of one episode with transitions ``columns``; see ``streams``."""
    inner = len(next(tree.leaves(columns["obs"]))) > steps
    return streams(columns, np.array([0]), np.array([steps]), np.array([inner]), reading, path)[0]


def streams(
    columns: Batch, begin: np.ndarray, steps: np.ndarray, inner: np.ndarray, reading: Reading, path: Path
) -> list[Batch]:
    """Return the rows ``[steps + 1, ...]`` of several episodes.

    Args:
        columns: all their transitions, ``[n, ...]``; ``obs`` may include the final observation.
        begin: first transition of each episode, ``[episodes]``.
        steps: number of steps to keep of each; see ``length_of``.
        inner: whether ``obs`` includes the final observation.

    Raises:
        ConfigError: they do not fit the run's spaces.
    """
    check_observations(columns, reading, path)
    firsts = np.cumsum(np.r_[0, steps + 1])
    finals, n, total = firsts[1:] - 1, begin + steps, firsts[-1]
    valid = np.ones(total, np.bool_)
    valid[finals] = False
    acted = np.arange(total) - np.repeat(firsts[:-1] - begin, steps + 1)
    source, acted = np.where(valid, acted, acted - ~np.repeat(inner, steps + 1)), acted[valid]

    def observed(obs: Any, after: Any = None) -> np.ndarray:
        found = np.asarray(obs)[source]
        if after is not None and not inner.all():
            last = np.asarray(after)[n[~inner] - 1]
            found = found.astype(np.result_type(found, last), copy=False)
            found[finals[~inner]] = last
        return found

    def padded(leaf: Any, dtype: Any = None) -> np.ndarray:
        values = np.asarray(leaf, dtype)
        found = np.zeros((total, *values.shape[1:]), values.dtype)
        found[valid] = values[acted]
        return found

    rows: Batch = {
        "obs": tree.map(observed, columns["obs"], *[columns[key] for key in ("next_obs",) if key in columns]),
        "action": padded(columns["action"]),
        "reward": padded(np.reshape(columns["reward"], -1), np.float32),
    }
    for key in ("terminated", "truncated"):
        flags = np.asarray(columns[key], np.bool_).reshape(-1) if key in columns else None
        rows[key] = np.zeros(total, np.bool_) if flags is None else padded(flags)
    rows["truncated"][finals - 1] |= ~rows["terminated"][finals - 1]
    rows["truncated"] &= ~rows["terminated"]
    for key in ("logp", "action_mask"):
        if key in columns:
            rows[key] = padded(columns[key], np.float32 if key == "logp" else np.bool_)
    if "action_mask" in rows:  # final rows have no action, but may be bootstrapped from
        rows["action_mask"][finals] = columns["next_action_mask"][n - 1] if "next_action_mask" in columns else True
    rows["is_first"], rows["valid"] = np.isin(np.arange(total), firsts[:-1]), valid
    rows = inside(rows, reading, path)
    return [tree.take(rows, slice(low, high)) for low, high in pairwise(firsts.tolist())]


def inside(rows: Batch, reading: Reading, path: Path) -> Batch:
    """Convert rows to rlplug's internal spaces.

    Raises:
        ConfigError: they do not fit the run's spaces.
    """
    if reading.spec is None:
        return rows
    group = only_group(reading.spec, path)
    rows = rows | {"obs": tree.map(np.ascontiguousarray, observe(group.obs)(_ordered(rows["obs"], group.obs)))}
    space, valid = group.action, rows["valid"]
    action = own_actions(checked_actions(rows["action"][valid], reading, path), space, reading.normalized_actions)
    rows["action"] = np.zeros((len(valid), *action.shape[1:]), action.dtype)
    rows["action"][valid] = action
    mask = reading.spec.extras.get("action_mask")
    if mask is not None and "action_mask" in rows and rows["action_mask"].shape[1:] != mask.shape:
        raise refused(path, f"has action masks of shape {[*rows['action_mask'].shape[1:]]}, but env has {mask}")
    if "logp" in rows and isinstance(space, spaces.Box) and space.is_bounded() and not reading.normalized_actions:
        rows["logp"] = rows["logp"] + np.log(_half_range(space)).sum(dtype=np.float32)  # density in [-1, 1]
    return rows


def checked_actions(action: np.ndarray, reading: Reading, path: Path) -> np.ndarray:
    """Return actions ``[n, ...]`` in the shape of the run's; discrete ``[n, 1]`` becomes ``[n]``.

    Raises:
        ConfigError: they do not fit the run's spaces.
    """
    if reading.spec is None:
        return action
    space = only_group(reading.spec, path).action
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise refused(path, "has actions of a Dict or Tuple, which are only read from recordings of rlplug itself")
    if isinstance(space, spaces.Discrete) and getattr(action, "shape", ())[1:] == (1,):
        action = action[:, 0]
    _check("actions", action, space, path)
    return action


def own_actions(action: np.ndarray, space: spaces.Space[Any], normalized: bool) -> np.ndarray:
    """Convert actions ``[n, ...]`` of a space to rlplug's: the inverse of ``envs.spaces.execute``."""
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
    """Return the parts of a Tuple by index; Minari names them ``_index_0`` etc."""
    if isinstance(space, spaces.Tuple) and isinstance(obs, dict):
        return [_ordered(obs.get(f"_index_{i}", obs.get(str(i))), part) for i, part in enumerate(space.spaces)]
    if isinstance(space, spaces.Dict):
        return {key: _ordered(obs[key], part) for key, part in space.spaces.items()}
    return obs


def _check(what: str, leaf: Any, space: spaces.Space[Any], path: Path) -> None:
    """Check dtype kind and shape of rows against a space, and the range of discrete values."""
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
        raise refused(path, f"has {what} of several parts ({', '.join(leaf)}), but env has {space}")
    shape = space.shape or ()
    if leaf.shape[1:] != shape:
        raise refused(path, f"has {what} of shape {[*leaf.shape[1:]]}, but env has {space}")
    if not isinstance(space, spaces.Box) and len(leaf):
        if not np.array_equal(leaf, np.floor(leaf)):
            raise refused(path, f"has {what} that are not integers, but env has {space}")
        low = getattr(space, "start", 0)
        n: Any = space.nvec if isinstance(space, spaces.MultiDiscrete) else getattr(space, "n", 2)
        high = low + (2 if isinstance(space, spaces.MultiBinary) else n)
        if np.any(leaf < low) or np.any(leaf >= high):
            raise refused(path, f"has {what} from {leaf.min()} to {leaf.max()}, but env has {space}")

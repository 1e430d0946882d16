"""Conversion between an environment's spaces and rlplug's ("inside").

Inside, floats are float32, Discrete spaces start at 0, a Tuple is a Dict with the keys "0", "1" and so on, and bounded
Box actions lie in [-1, 1]. The parts of Dict and Tuple actions are side by side: one Box, one MultiDiscrete, or one
``Hybrid``, in which the continuous part comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from rlplug import tree
from rlplug.spaces import Hybrid
from rlplug.types import ConfigError, EnvSpec, Group


def single_agent(
    obs: Space[Any],
    action: Space[Any],
    max_episode_steps: int | None,
    frame_stack: int = 1,
    mask_size: int | None = None,
) -> EnvSpec:
    """Return the spec of an environment with one agent.

    Args:
        mask_size: length of its action masks; None: it has none.

    Raises:
        ConfigError: a space has no counterpart inside.
    """
    return EnvSpec(
        {"agent": Group(inside_obs(obs), inside_action(action))},
        extras={} if mask_size is None else {"action_mask": MultiBinary(mask_size)},
        native_spaces={"agent": Group(obs, action)},
        max_episode_steps=max_episode_steps,
        frame_stack=frame_stack,
    )


def sample_tasks(space: Space[Any], n: int, generator: np.random.Generator) -> Any:
    """Return ``n`` samples of a space, leaves ``[n, ...]``."""
    space.seed(int(generator.integers(2**31)))
    return tree.map(lambda *x: np.stack(x), *(space.sample() for _ in range(n)))


def inside_obs(space: Space[Any]) -> Space[Any]:
    """Return the inside counterpart of an observation space.

    Raises:
        ConfigError: the space is none of Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and Tuples of them.
    """
    match space:
        case Box():
            dtype = np.float32 if np.issubdtype(space.dtype, np.floating) else space.dtype
            with np.errstate(over="ignore"):  # float64 bounds outside float32's range become infinite
                return Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype)
        case Discrete():
            return Discrete(int(space.n))
        case MultiDiscrete():
            return MultiDiscrete(space.nvec)
        case MultiBinary():
            return space
        case Dict():
            return Dict({key: inside_obs(sub) for key, sub in space.spaces.items()})
        case Tuple():
            return Dict({str(i): inside_obs(sub) for i, sub in enumerate(space.spaces)})
    if any(kind.__name__ == "MissionSpace" for kind in type(space).__mro__):
        raise ConfigError("env.id", "its observation contains a mission as text; use env=minigrid, which encodes it")
    raise ConfigError(
        "env.id",
        f"its observation space holds {space}; supported are Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and"
        " Tuples of them (env.drop leaves a key of a Dict out)",
    )


def inside_action(space: Space[Any]) -> Space[Any]:
    """Return the inside counterpart of an action space; a bounded Box becomes ``Box(-1, 1)``.

    The discrete parts of a Dict or Tuple become a MultiDiscrete ``[D]``, where a MultiBinary has two choices for each
    of its bits, the continuous parts a Box ``[D]``, and both together a ``Hybrid``; a single part stays as it is.

    Raises:
        ConfigError: the space is none of float Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and Tuples of them.
    """
    match space:
        case Box() if np.issubdtype(space.dtype, np.floating):
            bound = 1.0 if space.is_bounded() else np.inf
            return Box(-bound, bound, space.shape, np.float32)
        case Discrete() | MultiDiscrete() | MultiBinary():
            return inside_obs(space)
        case Dict() | Tuple() if parts := [inside_action(sub) for sub in leaves_of(space)]:
            if len(parts) == 1:
                return parts[0]
            boxes = [part for part in parts if isinstance(part, Box)]
            sizes = [_choices(part) for part in parts if not isinstance(part, Box)]
            if not boxes:
                return MultiDiscrete(np.concatenate(sizes))
            low, high = (np.concatenate([getattr(x, of).ravel() for x in boxes]) for of in ("low", "high"))
            numbers = Box(low, high, dtype=np.float32)
            return Hybrid(numbers, MultiDiscrete(np.concatenate(sizes))) if sizes else numbers
    raise ConfigError(
        "env.id",
        f"its action space is {in_words(space)}; supported are float Box, Discrete, MultiDiscrete and MultiBinary, and"
        " Dicts and Tuples of them",
    )


def parts_of(space: Dict | Tuple) -> dict[Any, Space[Any]]:
    """Return the parts of a Dict by key, or of a Tuple by index."""
    return dict(space.spaces) if isinstance(space, Dict) else dict(enumerate(space.spaces))


def leaves_of(space: Space[Any]) -> list[Space[Any]]:
    """Return the parts of a Dict or Tuple, also of nested ones, in their order; any other space is one part."""
    if isinstance(space, Dict | Tuple):
        return [leaf for part in parts_of(space).values() for leaf in leaves_of(part)]
    return [space]


def order_of(space: Space[Any]) -> np.ndarray | None:
    """Return the index that puts an inside hybrid action into the order of the parts, ``[A]``.

    None: the action has that order already.
    """
    if not isinstance(space, Dict | Tuple) or not isinstance(inside_action(space), Hybrid):
        return None
    leaves = leaves_of(space)
    chosen = np.repeat([not isinstance(x, Box) for x in leaves], [int(np.prod(x.shape or ())) for x in leaves])
    return np.argsort(np.argsort(chosen, kind="stable"), kind="stable")


def _choices(space: Space[Any]) -> np.ndarray:
    """Return the number of choices of each component of a discrete inside space, ``[D]``."""
    if isinstance(space, Discrete):
        return np.array([space.n])
    return space.nvec.ravel() if isinstance(space, MultiDiscrete) else np.full(int(np.prod(space.shape or ())), 2)


def observe(space: Space[Any]) -> Callable[[Any], Any]:
    """Return a function from batches of the environment's observations to inside ones: an array, or a dict of them.

    It copies only what has to change: the result may be the environment's own memory.
    """
    if isinstance(space, Dict):
        parts = {key: observe(sub) for key, sub in space.spaces.items()}
        return lambda obs: {key: part(obs[key]) for key, part in parts.items()}
    if isinstance(space, Tuple):
        each = [observe(sub) for sub in space.spaces]
        return lambda obs: {str(i): part(obs[i]) for i, part in enumerate(each)}
    dtype = inside_obs(space).dtype
    start: Any = getattr(space, "start", 0)
    if np.any(start):
        return lambda obs: np.asarray(obs, dtype) - start
    return lambda obs: np.asarray(obs, dtype)


def in_words(space: Space[Any]) -> str:
    """Format a space as one line: NumPy breaks the bounds of a Box into several."""
    return " ".join(str(space).split())


def batched(space: Space[Any], obs: Any) -> tuple[Any, int | None]:
    """Add a leading axis to observations of an environment's space, if they have none.

    Args:
        obs: one observation, or a batch ``[n, ...]``; a dict or tuple of them for a Dict or Tuple space.

    Returns:
        The batch ``[n, ...]``, where a Tuple is a dict with the keys 0, 1 and so on, and its ``n``, or None for one
        observation.

    Raises:
        ValueError: they do not match the space.
    """
    if isinstance(space, Dict | Tuple):
        spaces: dict[Any, Any] = space.spaces if isinstance(space, Dict) else dict(enumerate(space.spaces))
        given = dict(enumerate(obs)) if isinstance(space, Tuple) and isinstance(obs, tuple) else obs
        if not isinstance(given, Mapping) or given.keys() != spaces.keys():
            got = f"a {type(obs).__name__}"
            got += f" of {', '.join(map(str, given))}" if isinstance(given, Mapping) else ""
            raise ValueError(f"the observation is {got}; the observation space is {in_words(space)}")
        parts = {key: batched(sub, given[key]) for key, sub in spaces.items()}
        counts = {n for _, n in parts.values()}
        if len(counts) != 1:
            differ = "the parts of the observation differ in their leading axis"
            raise ValueError(f"{differ}; the space is {in_words(space)}")
        return {key: part for key, (part, _) in parts.items()}, counts.pop()
    try:
        x, shape = np.asarray(obs), space.shape or ()
    except ValueError:  # parts of different shapes
        x, shape = np.asarray(None), ()
    if x.dtype.kind not in ("iubf" if np.issubdtype(space.dtype, np.floating) else "iub"):
        got = f"of type {x.dtype}" if x.dtype.kind in "iubf" else f"a {type(obs).__name__}"
        pair = ": reset() returns it and an info" if isinstance(obs, tuple) else ""
        raise ValueError(f"the observation is {got}{pair}; the observation space is {in_words(space)}")
    lead = x.ndim - len(shape)
    if lead not in (0, 1) or x.shape[lead:] != shape:
        raise ValueError(
            f"the observation has shape {[*x.shape]}; the observation space is {in_words(space)}: {[*shape]}, or"
            f" [{', '.join(map(str, ('n', *shape)))}] for n of them"
        )
    if x.dtype.kind == "f" and np.isnan(x).any():
        raise ValueError("the observation holds NaN")
    if isinstance(space, Discrete | MultiDiscrete):
        n = space.n if isinstance(space, Discrete) else space.nvec
        if np.any(x < space.start) or np.any(x >= space.start + n):
            raise ValueError(f"the observation {x.tolist()} is outside of the observation space, {in_words(space)}")
    return (x, len(x)) if lead else (x[None], None)


def execute(space: Space[Any]) -> Callable[[np.ndarray], Any]:
    """Return a function from inside actions ``[B, ...]`` to the environment's own: an array, dict or tuple.

    Box actions are rescaled from [-1, 1] if they are bounded on both sides, and clipped to their bounds. The result
    never shares memory with the argument, since environments may keep actions.
    """
    run, order = _execute(space), order_of(space)
    return run if order is None else lambda action: run(action[:, order])


def _execute(space: Space[Any]) -> Callable[[np.ndarray], Any]:
    """Return ``execute`` of actions whose parts are in the order of the space."""
    if isinstance(space, Dict | Tuple):
        each = [(key, _execute(sub), inside_action(sub).shape or ()) for key, sub in parts_of(space).items()]
        cuts = np.cumsum([int(np.prod(shape)) for _, _, shape in each])

        def apart(action: np.ndarray) -> Any:
            pieces = np.split(action.reshape(len(action), -1), cuts[:-1], axis=1)
            parts = {key: run(x.reshape(len(x), *shape)) for (key, run, shape), x in zip(each, pieces, strict=True)}
            return parts if isinstance(space, Dict) else tuple(parts.values())

        return apart
    dtype: Any = space.dtype
    if isinstance(space, Box) and np.isfinite([space.low, space.high]).any():
        low, high = space.low, space.high
        both = np.isfinite(low) & np.isfinite(high)
        # halves: the full difference may overflow
        half_low, half_high = (np.where(both, bound, 0).astype(np.float64) / 2 for bound in (low, high))
        scale, middle = np.where(both, half_high - half_low, 1).astype(dtype), (half_high + half_low).astype(dtype)
        centred = not middle.any()

        def rescale(action: np.ndarray) -> np.ndarray:
            out = np.multiply(action, scale, dtype=dtype)
            if not centred:
                out += middle
            np.maximum(out, low, out=out)
            return np.minimum(out, high, out=out)

        return rescale
    start: Any = getattr(space, "start", 0)
    if np.any(start):
        return lambda action: (action + start).astype(dtype, copy=False)
    return lambda action: action.astype(dtype)


def take(actions: Any, index: Any) -> Any:
    """Return the actions of a column or of several: ``actions[index]`` of every part of a dict or tuple."""
    if isinstance(actions, dict):
        return {key: take(part, index) for key, part in actions.items()}
    return tuple(take(part, index) for part in actions) if isinstance(actions, tuple) else actions[index]


def columns(actions: Any, n: int) -> Iterable[Any]:
    """Return the environment's own actions of ``n`` columns, one by one."""
    return (take(actions, i) for i in range(n)) if isinstance(actions, dict | tuple) else actions


def joined(space: Space[Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Return ``execute`` with the parts of a Dict or Tuple side by side in their order, shaped like inside actions.

    Hybrid actions have the type of their continuous part.
    """
    run = execute(space)
    if not isinstance(space, Dict | Tuple):
        return run

    def leaves(actions: Any) -> list[np.ndarray]:
        if isinstance(actions, dict | tuple):
            parts = actions.values() if isinstance(actions, dict) else actions
            return [leaf for part in parts for leaf in leaves(part)]
        return [actions.reshape(len(actions), -1)]

    floats = [leaf.dtype for leaf in leaves_of(space) if isinstance(leaf, Box)]
    dtype: Any = np.result_type(*floats) if floats else None
    return lambda action: np.concatenate(leaves(run(action)), 1, dtype=dtype).reshape(action.shape)


def allocate(space: Space[Any], *lead: int) -> Any:
    """Allocate zero observations of an inside space, ``[*lead, ...]``; a Tuple is a dict with keys 0, 1, ..."""
    if isinstance(space, Tuple):
        return {str(i): allocate(sub, *lead) for i, sub in enumerate(space.spaces)}
    if isinstance(space, Dict):
        return {key: allocate(sub, *lead) for key, sub in space.spaces.items()}
    assert space.shape is not None
    return np.zeros((*lead, *space.shape), space.dtype)


def equal(a: Any, b: Any) -> bool:
    """Return whether two batches of observations are bit-identical (NaN equals NaN)."""

    def same(x: Any, y: Any) -> bool:
        return np.array_equal(x, y, equal_nan=np.issubdtype(np.asarray(x).dtype, np.floating))

    return all(tree.leaves(tree.map(same, a, b)))

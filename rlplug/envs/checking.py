"""Check an environment's outputs against its spaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple

from rlplug import tree
from rlplug.envs.spaces import in_words, inside_obs
from rlplug.types import ConfigError, Group, Tree

ROUNDING = 1e-5
"""tolerance of observation bounds, relative to the bound"""
NUMBERS = {"f": "fiub", "i": "iub", "u": "iub", "b": "iub"}
"""dtype kinds accepted for each dtype kind of a space"""
SPACES = {"obs": "obs", "action": "action", "prev_action": "action"}
"""keys of a row, and the space of a group that contains their values"""


RESET = "write Gymnasium's (observation, info) = reset(seed=None, options=None)"
STEP = "write Gymnasium's (observation, reward, terminated, truncated, info) = step(action)"
OLD = "the environment looks like Gym before 0.26"


class MisfitError(Exception):
    """An environment returned a value outside its spaces."""


def rules_broken(where: str, error: BaseException) -> str | None:
    """Return how ``reset`` or ``step`` breaks Gymnasium's API, if that made its caller raise ``error``.

    The caller is this package or a Gymnasium wrapper; errors of the environment itself are not considered.
    """
    trace, said = error.__traceback__, str(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    if module.partition(".")[0] not in ("gymnasium", "rlplug"):
        return None
    if isinstance(error, TypeError) and (argument := re.search(r"unexpected keyword argument '(seed|options)'", said)):
        return f"{where}() takes no {argument[1]!r}; {RESET}, and {OLD}" if where == "reset" else None
    counts = re.match(r"(?:not enough|too many) values to unpack \(expected (\d+)(?:, got (\d+))?\)", said)
    if not counts and not re.match("cannot unpack non-(?:iterable|sequence)", said):
        return None
    got = "returns a different type" if counts is None else f"returns {counts[2] or 'too many'} values"
    old = f", and {OLD}" if counts and counts.groups() in (("5", "4"), ("2", None)) else ""
    return f"{where}() {got}; {STEP if where == 'step' else RESET}{old}"


_taken: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""environments that belong to a vector of this process and still exist, by identity"""


def take_over(envs: Iterable[Any]) -> None:
    """Register environments, without their wrappers, as those of one vector, which steps and closes them.

    Raises:
        ConfigError: one of them already belongs to this vector or to another one, possibly closed.
    """
    for env in envs:
        inner = getattr(env, "unwrapped", env)
        if _taken.get(id(inner)) is inner:
            said = f"{type(inner).__name__} was created once and returned twice, which would mix its episodes"
            way = "its factory must return a new object at every call"
            raise ConfigError("env", f"one object of {said}: {way}, for each of num_envs and for evaluations")
        _taken[id(inner)] = inner


def check_seeds(seeds: Sequence[int], num_envs: int) -> None:
    """Check that there is one seed per environment, else raise ``ValueError``."""
    if len(seeds) != num_envs:
        raise ValueError(f"{len(seeds)} seeds for {num_envs} environments")


def _flat(state: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts and lists."""
    if isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _flat(part)
    else:
        yield state


def check_state(own: Tree, state: Tree, counts: Sequence[str]) -> None:
    """Check a state that an environment is to restore.

    Args:
        own: the environment's state after a reset.
        counts: names of the state's seeds and counters.

    Raises:
        ValueError: keys, shapes or dtypes differ from the own ones, it holds tensors, or a count is negative.
    """
    tree.check_like(own, state, "env", exact=True)
    if any(hasattr(leaf, "shape") and not isinstance(leaf, np.ndarray | np.generic) for leaf in _flat(state)):
        raise ValueError("env holds tensors where it should hold arrays")
    for name in counts:
        if np.min(state[name]) < 0:
            raise ValueError(f"env.{name} is negative")


def reader(space: Space[Any], n: int | None = None) -> Callable[[Any], Any]:
    """Return a function from an environment's observation to the inside one: an array, or a dict of them.

    It copies only what has to change. It raises ``MisfitError`` if shape or type do not match the space, or an index
    (of Discrete, MultiDiscrete, MultiBinary) is out of range; for the bounds of a Box see ``Bounds``.

    Args:
        n: batch size of the observations; None: single observations.
    """
    return _reader("observation", space, n)


def _reader(name: str, space: Space[Any], n: int | None) -> Callable[[Any], Any]:
    if isinstance(space, Dict):
        parts = {key: _reader(f"{name}[{key!r}]", sub, n) for key, sub in space.spaces.items()}

        def read_dict(obs: Any) -> Any:
            try:
                return {key: read(obs[key]) for key, read in parts.items()}
            except (KeyError, TypeError, IndexError):
                if isinstance(obs, dict) and parts.keys() <= obs.keys():
                    raise
                got = f"a dict with {', '.join(map(repr, obs))}" if isinstance(obs, dict) else _kind(obs)
                raise MisfitError(f"{name} is {got}; its space has the keys {', '.join(map(repr, parts))}") from None

        return read_dict
    if isinstance(space, Tuple):
        each = [_reader(f"{name}[{i}]", sub, n) for i, sub in enumerate(space.spaces)]

        def read_tuple(obs: Any) -> Any:
            if not isinstance(obs, tuple | list) or len(obs) != len(each):
                got = f"{len(obs)} parts" if isinstance(obs, tuple | list) else _kind(obs)
                raise MisfitError(f"{name} is {got}; its space is a Tuple of {len(each)}")
            return {str(i): read(part) for i, (read, part) in enumerate(zip(each, obs, strict=True))}

        return read_tuple
    return leaf_reader(name, space, n)


def leaf_reader(name: str, space: Space[Any], n: int | None = None) -> Callable[[Any], np.ndarray]:
    """Return a function like ``reader`` for a space that is not a Dict or Tuple, with ``name`` in its errors."""
    assert space.shape is not None
    shape = space.shape if n is None else (n, *space.shape)
    inside = inside_obs(space)
    dtype: np.dtype[Any] = np.dtype(inside.dtype)
    kinds, start = NUMBERS[dtype.kind], getattr(space, "start", 0)
    shifted = bool(np.any(start))
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    indices = None if isinstance(space, Box) else limits_of(inside)

    def read(obs: Any) -> np.ndarray:
        try:
            x = obs if type(obs) is np.ndarray else np.asarray(obs)
        except ValueError:
            raise MisfitError(f"{name} is not an array; its space is {in_words(space)}") from None
        if x.shape != shape:
            raise MisfitError(f"{name} has shape {[*x.shape]}; its space declares {[*shape]}")
        if x.dtype.kind not in kinds:
            raise MisfitError(f"{name} is of type {x.dtype}; its space declares {space.dtype}")
        if x.dtype != dtype:
            if limits and x.size and (x.min() < limits.min or x.max() > limits.max):
                raise MisfitError(f"{name} holds {x.min()} to {x.max()}; its space declares {space.dtype}")
            x = x.astype(dtype)
        if shifted:
            x = x - start
        if indices and ((x < indices[0]) | (x > indices[1])).any():
            raise MisfitError(f"{name} is {(x + start).tolist()}; its space is {in_words(space)}")
        return x

    return read


def number(reward: Any) -> float:
    """Return a reward as one number. Raises ``MisfitError`` if it is not a number."""
    return float(column("reward", reward, (), "fiub"))


def flag(name: str, end: Any) -> bool:
    """Return ``terminated`` or ``truncated`` as a bool; accepts 0 and 1. Raises ``MisfitError`` for other values."""
    return bool(column(name, end, (), "biu"))


def column(name: str, given: Any, shape: tuple[int, ...], kinds: str) -> np.ndarray:
    """Return a value of a step, other than its observation, as an array.

    Args:
        shape: ``[B]``, or ``[]`` for a single environment.
        kinds: accepted dtype kinds, the most common first; without floats, values are True or False.

    Raises:
        MisfitError: shape or type differ.
    """
    if type(given) is np.ndarray and given.dtype.kind == kinds[0] and given.shape == shape:
        return given  # the fast, common path
    try:
        x = np.asarray(given)
    except Exception:  # lists of different lengths; tensors on another device
        x = np.asarray(None)
    is_flag = "f" not in kinds
    wanted = f"{'a bool' if is_flag else 'a number'}{f' for each of {shape[0]} environments' if shape else ''}"
    if x.dtype.kind not in kinds or (is_flag and x.dtype.kind != "b" and not np.isin(x, (0, 1)).all()):
        said = f"{given!r}" if x.shape == () else f"an array of {x.dtype}"
        raise MisfitError(f"{name} is {said}; it should be {wanted}")
    if x.shape != shape:
        raise MisfitError(f"{name} has shape {[*x.shape]}; it should be {wanted}")
    return x


def began(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the result of ``reset``. Raises ``MisfitError`` if it is not (observation, info)."""
    if not isinstance(answer, tuple) or len(answer) != 2:  # pyright: ignore[reportUnknownArgumentType]
        got = f"{len(answer)} values" if isinstance(answer, tuple) else f"one value {_kind(answer)}"  # pyright: ignore[reportUnknownArgumentType]
        raise MisfitError(f"reset() returns {got}; {RESET}")
    obs, info = answer
    return obs, described("reset", info)


def described(where: str, info: Any) -> Mapping[str, Any]:
    """Return the ``info`` of ``reset`` or ``step``. Raises ``MisfitError`` if it is not a dict."""
    if type(info) is not dict and not isinstance(info, Mapping):
        raise MisfitError(f"the info that {where}() returns is {_kind(info)}; it should be a dict")
    return info


def writer(space: Space[Any], out: Any) -> Callable[[int, Any], None]:
    """Return a function that writes an environment's observation to a row of ``out``, a batch of inside ones.

    It raises the same errors as that of ``reader``.
    """
    read = reader(space)
    if not isinstance(space, Box):
        return lambda i, obs: tree.put(out, i, read(obs))
    shape, dtype, array = space.shape, out.dtype, np.ndarray

    def put(i: int, obs: Any) -> None:
        usual = type(obs) is array and obs.dtype is dtype and obs.shape == shape
        out[i] = obs if usual else read(obs)

    return put


class Bounds:
    """Finds observations outside the bounds of their space.

    Args:
        space: space of the inside observations.
    """

    def __init__(self, space: Space[Any]) -> None:
        self._leaves = [(path, leaf, found) for path, leaf in _leaves(space) if (found := limits_of(leaf))]

    def find(self, obs: Any) -> tuple[int, int, str] | None:
        """Return row, column and description of the first number out of bounds, or None.

        Args:
            obs: rows ``[T, B, ...]``; NaN is ignored.
        """
        found: list[tuple[int, int, str]] = []
        for path, space, (low, high) in self._leaves:
            x = obs
            for key in path:
                x = x[key]
            beyond = (x < low) | (x > high)
            if np.count_nonzero(beyond):
                t, b, *place = np.argwhere(beyond)[0].tolist()
                found.append((t, b, _describe(path, space, x[t, b], tuple(place))))
        return min(found) if found else None


def checked(groups: Mapping[str, Group], saved: Any) -> Any:
    """Return a saved tree that holds rows at any depth, if their actions and observations are in discrete spaces.

    Raises:
        ValueError: one is not; networks and environments would index out of range.
    """
    parts: Any = enumerate(saved) if isinstance(saved, list | tuple) else ()
    for key, part in saved.items() if isinstance(saved, dict) else parts:
        if key != "env":  # an environment's own state
            checked({key: groups[key]} if key in groups else groups, part)
        if key in SPACES and len(groups) == 1:
            (group,) = groups.values()
            for path, space in _leaves(getattr(group, SPACES[key])):
                _check_choices(".".join((key, *path)), space, part, path)
    return saved


def _check_choices(name: str, space: Space[Any], saved: Any, path: tuple[str, ...]) -> None:
    limits = None if isinstance(space, Box) else limits_of(space)
    if limits is None:
        return
    for key in path:
        saved = saved[key]
    x = np.asarray(saved)
    if ((x < limits[0]) | (x > limits[1])).any():
        raise ValueError(f"{name} ranges from {x.min()} to {x.max()}; its space is {in_words(space)}")


def _leaves(space: Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Space[Any]]]:
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            yield from _leaves(sub, (*path, key))
    else:
        yield path, space


def limits_of(space: Space[Any]) -> tuple[Any, Any] | None:
    """Return the bounds of an inside leaf, with a tolerance for rounding; None if its dtype cannot exceed them."""
    match space:
        case Discrete():
            return 0, int(space.n) - 1
        case MultiDiscrete():
            return 0, space.nvec - 1
        case Box() if space.dtype.kind == "f":
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            low, high = low - ROUNDING * np.maximum(-low, 1), high + ROUNDING * np.maximum(high, 1)
            with np.errstate(over="ignore"):
                limits = low.astype(space.dtype), high.astype(space.dtype)
            return limits if np.isfinite(limits).any() else None
        case Box() if space.dtype.kind in "iu":
            integers: Any = np.iinfo(np.dtype(space.dtype))  # pyright: ignore[reportArgumentType, reportCallIssue]
            least, most = integers.min, integers.max
            return (space.low, space.high) if (space.low > least).any() or (space.high < most).any() else None
        case Box():
            return None
    return 0, 1


def _describe(path: tuple[str, ...], space: Space[Any], x: np.ndarray, place: tuple[int, ...]) -> str:
    name = "".join(["observation", *(f"[{key!r}]" for key in path)])
    holds = f"{name} is {x[place]!s}" if not place else f"{name} holds {x[place]!s} at {[*place]}"
    if isinstance(space, Box):
        return f"{holds}, beyond the bounds of its space, {space.low[place]!s} to {space.high[place]!s}"
    return f"{holds}, outside of its space, {in_words(space)}"


def _kind(x: Any) -> str:
    return f"of type {type(x).__name__}"

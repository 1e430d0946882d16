"""Is what an environment says what its spaces promise?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple

from rlplug import tree
from rlplug.envs.spaces import in_words, inside_obs
from rlplug.types import ConfigError

ROUNDING = 1e-5
"""so far, relative to a bound, an observation may lie beyond it"""
NUMBERS = {"f": "fiub", "i": "iub", "u": "iub", "b": "iub"}
"""kinds of numbers that stand for those of a space"""


RESET = "write Gymnasium's (observation, info) = reset(seed=None, options=None)"
STEP = "write Gymnasium's (observation, reward, terminated, truncated, info) = step(action)"
OLD = "what there is looks like Gym before 0.26"


class MisfitError(Exception):
    """An environment said what its spaces do not allow."""


def rules_broken(where: str, error: BaseException) -> str | None:
    """Return how ``reset`` or ``step`` differs from Gymnasium's, where that is why a caller of it raised ``error``.

    The caller is this package or a wrapper of Gymnasium; what an environment raises itself is another matter.
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
    got = "returns something else" if counts is None else f"returns {counts[2] or 'too many'} values"
    old = f", and {OLD}" if counts and counts.groups() in (("5", "4"), ("2", None)) else ""
    return f"{where}() {got}; {STEP if where == 'step' else RESET}{old}"


_taken: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""environments that this process has taken over and that still exist, by their identity"""


def take_over(envs: Iterable[Any]) -> None:
    """Note environments as those of one vector, which steps and closes them, whatever is wrapped around them.

    Raises:
        ConfigError: one of them was taken over before, by this vector or by another one, which may be closed.
    """
    for env in envs:
        inner = getattr(env, "unwrapped", env)
        if _taken.get(id(inner)) is inner:
            said = f"{type(inner).__name__} was made once and handed out twice, and its episodes would mix"
            way = "whatever makes it has to return a new object at every call"
            raise ConfigError("env", f"one object of {said}: {way}, for each of num_envs and for evaluations")
        _taken[id(inner)] = inner


def check_seeds(seeds: Sequence[int], num_envs: int) -> None:
    """Check that environments are reset with one seed each; raise ``ValueError``."""
    if len(seeds) != num_envs:
        raise ValueError(f"{len(seeds)} seeds for {num_envs} environments")


def reader(space: Space[Any], n: int | None = None) -> Callable[[Any], Any]:
    """Function from an environment's observation to the inside one: an array, or a dict of them.

    It copies only what has to change. It raises ``MisfitError`` where shape or type are not those of the space, or an
    index (of Discrete, MultiDiscrete, MultiBinary) is out of range; for the bounds of a Box see ``Bounds``.

    Args:
        n: it reads batches of ``n``; None: single observations.
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
    """Function as that of ``reader``, for a space that is no Dict or Tuple; errors call what it reads ``name``."""
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
            raise MisfitError(f"{name} is no array; its space is {in_words(space)}") from None
        if x.shape != shape:
            raise MisfitError(f"{name} has shape {[*x.shape]}; its space says {[*shape]}")
        if x.dtype.kind not in kinds:
            raise MisfitError(f"{name} is of type {x.dtype}; its space says {space.dtype}")
        if x.dtype != dtype:
            if limits and x.size and (x.min() < limits.min or x.max() > limits.max):
                raise MisfitError(f"{name} holds {x.min()} to {x.max()}; its space says {space.dtype}")
            x = x.astype(dtype)
        if shifted:
            x = x - start
        if indices and ((x < indices[0]) | (x > indices[1])).any():
            raise MisfitError(f"{name} is {(x + start).tolist()}; its space is {in_words(space)}")
        return x

    return read


def number(reward: Any) -> float:
    """A reward as one number. Raises ``MisfitError`` if it is none."""
    return float(column("reward", reward, (), "fiub"))


def flag(name: str, end: Any) -> bool:
    """``terminated`` or ``truncated`` as a bool; 0 and 1 stand for one. Raises ``MisfitError`` if it is none."""
    return bool(column(name, end, (), "biu"))


def column(name: str, given: Any, shape: tuple[int, ...], kinds: str) -> np.ndarray:
    """What a step says beside its observation, as an array.

    Args:
        shape: ``[B]``, or ``[]`` of a single environment.
        kinds: of numbers that it may hold, the usual one first; without floats among them it is True or False.

    Raises:
        MisfitError: it has another shape or type.
    """
    if type(given) is np.ndarray and given.dtype.kind == kinds[0] and given.shape == shape:
        return given  # as mostly, without what the rest costs
    try:
        x = np.asarray(given)
    except Exception:  # lists of different lengths; tensors of another device
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
    """What ``reset`` returned. Raises ``MisfitError`` if it is not (observation, info)."""
    if not isinstance(answer, tuple) or len(answer) != 2:  # pyright: ignore[reportUnknownArgumentType]
        got = f"{len(answer)} values" if isinstance(answer, tuple) else f"one value {_kind(answer)}"  # pyright: ignore[reportUnknownArgumentType]
        raise MisfitError(f"reset() returns {got}; {RESET}")
    obs, info = answer
    return obs, described("reset", info)


def described(where: str, info: Any) -> Mapping[str, Any]:
    """The ``info`` of ``reset`` or ``step``. Raises ``MisfitError`` if it is no dict."""
    if type(info) is not dict and not isinstance(info, Mapping):
        raise MisfitError(f"the info that {where}() returns is {_kind(info)}; it should be a dict")
    return info


def writer(space: Space[Any], out: Any) -> Callable[[int, Any], None]:
    """Function that puts an environment's observation into a row of ``out``, a batch of inside ones.

    It raises as the function that ``reader`` gives.
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
    """Finds observations with numbers that their space excludes.

    Args:
        space: of the inside observations.
    """

    def __init__(self, space: Space[Any]) -> None:
        self._leaves = [(path, leaf, found) for path, leaf in _leaves(space) if (found := limits_of(leaf))]

    def find(self, obs: Any) -> tuple[int, int, str] | None:
        """Row, column and description of the first number that is out of bounds; None where there is none.

        Args:
            obs: rows ``[T, B, ...]``; NaN is not looked at.
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


def _leaves(space: Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Space[Any]]]:
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            yield from _leaves(sub, (*path, key))
    else:
        yield path, space


def limits_of(space: Space[Any]) -> tuple[Any, Any] | None:
    """The bounds of an inside leaf, with room for rounding; None where its type has no other numbers."""
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

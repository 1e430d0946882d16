"""JSON serialization of ``EnvSpec``, so that checkpoints hold the spaces without the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from rlplug import tree
from rlplug.envs.spaces import in_words, inside_action, inside_obs
from rlplug.spaces import Hybrid
from rlplug.types import CheckpointError, ConfigError, EnvSpec, Group


def to_json(spec: EnvSpec) -> dict[str, Any]:
    """Convert a spec to dicts, lists, numbers and strings; ``from_json`` is the inverse.

    Raises:
        ConfigError: a space is none of Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and Tuples of them.
    """
    return {
        "groups": _groups_to_json(spec.groups),
        "native_spaces": _groups_to_json(spec.native_spaces),
        "extras": _extras_to_json(spec.extras),
        "max_episode_steps": spec.max_episode_steps,
        "offers": sorted(spec.offers),
        "frame_stack": spec.frame_stack,
    }


def from_json(node: Any) -> EnvSpec:
    """Convert the result of ``to_json`` to a spec.

    Raises:
        CheckpointError: ``node`` is not a result of ``to_json``.
    """
    try:
        if not node["groups"]:
            raise ValueError("there are no groups")
        return EnvSpec(
            _groups_from_json(node["groups"]),
            native_spaces=_groups_from_json(node["native_spaces"]),
            extras=_extras_from_json(node["extras"]),
            max_episode_steps=None if node["max_episode_steps"] is None else _count(node["max_episode_steps"]),
            offers=frozenset(map(_text, node["offers"])),
            frame_stack=_count(node["frame_stack"]),
        )
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, MemoryError) as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"the environment's spaces cannot be read from the manifest ({what})") from None


def playable(node: Any) -> EnvSpec:
    """Return ``from_json(node)`` if observations and actions of its native spaces can be converted to those inside.

    Raises:
        CheckpointError: they cannot, or as ``from_json``.
    """
    spec = from_json(node)
    for name, native in spec.native_spaces.items():
        group = spec.groups.get(name)
        if group is None or (inside_obs(native.obs), inside_action(native.action)) != (group.obs, group.action):
            raise CheckpointError(f"the native spaces of {name!r} in the manifest do not match those inside")
    return spec


NOTHING = ("nothing", None)


def mismatch(saved: EnvSpec, now: EnvSpec) -> str | None:
    """Describe how the environment differs; None if it does not."""
    before, after = dict(_facts(saved)), dict(_facts(now))
    for what in dict.fromkeys((*before, *after)):
        (text, exact), (text_now, exact_now) = before.get(what, NOTHING), after.get(what, NOTHING)
        if exact != exact_now:
            return f"{what} was {text}, and is {text_now if text != text_now else 'another that prints the same'}"
    return None


def _facts(spec: EnvSpec) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield (name, (text, JSON)) of each property, the environment's own spaces first."""
    yield "who plays", (", ".join(spec.groups), list(spec.groups))
    for where, groups in (("", spec.native_spaces), (" inside", spec.groups)):
        for name, group in groups.items():
            of = "" if name == "agent" else f" of {name}"
            yield f"the observation space{of}{where}", _shown(group.obs)
            yield f"the action space{of}{where}", _shown(group.action)
            yield f"the list of agents{of}{where}", (", ".join(group.agents) or "empty", list(group.agents))
            for extra, space in group.extras.items():
                yield f"the space of {extra!r}{of}{where}", _shown(space)
    for name, space in spec.extras.items():
        yield f"the space of {name!r}", _shown(space)
    limit = spec.max_episode_steps
    yield "the step limit of episodes", (f"{limit} steps" if limit else "none", limit)
    yield "the list of optional features", (", ".join(sorted(spec.offers)) or "nothing", sorted(spec.offers))
    yield "the number of stacked frames", (str(spec.frame_stack), spec.frame_stack)


def _shown(space: Space[Any]) -> tuple[str, Any]:
    return in_words(space), space_to_json(space)


def _groups_to_json(groups: Mapping[str, Group]) -> list[Any]:
    return [
        {
            "name": name,
            "obs": space_to_json(group.obs),
            "action": space_to_json(group.action),
            "agents": list(group.agents),
            "extras": _extras_to_json(group.extras),
        }
        for name, group in groups.items()
    ]


def _groups_from_json(nodes: list[Any]) -> dict[str, Group]:
    return {
        _text(node["name"]): Group(
            space_from_json(node["obs"]),
            space_from_json(node["action"]),
            tuple(map(_text, node["agents"])),
            _extras_from_json(node.get("extras", ())),  # datasets of earlier versions have none
        )
        for node in nodes
    }


def _extras_to_json(extras: Mapping[str, Space[Any]]) -> list[Any]:
    return [[name, space_to_json(space)] for name, space in extras.items()]


def _extras_from_json(nodes: Any) -> dict[str, Space[Any]]:
    return {_text(name): space_from_json(space) for name, space in nodes}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is {tree.what(value)}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a count is {tree.what(value)}, or below 1")
    return value


def space_to_json(space: Space[Any]) -> dict[str, Any]:
    """Convert one space. A bound shared by all elements of a Box is written once.

    Raises:
        ConfigError: as for ``to_json``.
    """
    match space:
        case Box() if space.dtype.itemsize <= 8:
            return {
                "type": "Box",
                "shape": list(space.shape),
                "dtype": _dtype(space),
                "low": _bounds(space.low, space.bounded_below, "-inf"),
                "high": _bounds(space.high, space.bounded_above, "inf"),
            }
        case Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": _dtype(space)}
        case MultiDiscrete():
            nvec, start = space.nvec.tolist(), space.start.tolist()
            return {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": _dtype(space)}
        case Hybrid():
            parts = (("continuous", space.continuous), ("discrete", space.discrete))
            return {"type": "Hybrid", **{name: space_to_json(part) for name, part in parts}}
        case MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
        case Dict() if all(isinstance(key, str) for key in space.spaces):
            return {"type": "Dict", "spaces": [[key, space_to_json(sub)] for key, sub in space.spaces.items()]}
        case Tuple():
            return {"type": "Tuple", "spaces": [space_to_json(sub) for sub in space.spaces]}
    served = "Box of at most 64 bits, Discrete, MultiDiscrete, MultiBinary, Tuples of them, Dicts with texts as keys"
    raise ConfigError("env", f"the space {space} cannot be written into a checkpoint; supported are {served}")


def space_from_json(node: Any) -> Space[Any]:
    """Convert the result of ``space_to_json`` to a space.

    Raises:
        KeyError, TypeError, ValueError: ``node`` is not such a result.
    """
    match node["type"]:
        case "Box":
            shape, dtype = tuple(node["shape"]), np.dtype(node["dtype"])
            limits = np.iinfo(dtype) if dtype.kind in "iu" else None
            low, bounded_below = _array(node["low"], shape, dtype, limits.min if limits else -np.inf)
            high, bounded_above = _array(node["high"], shape, dtype, limits.max if limits else np.inf)
            box = Box(low, high, shape, dtype.type if dtype.isnative else dtype)  # type: ignore[arg-type]
            box.bounded_below, box.bounded_above = bounded_below, bounded_above
            return box
        case "Discrete":
            kwargs: Any = {} if node["dtype"] == "int64" else {"dtype": np.dtype(node["dtype"])}
            return Discrete(node["n"], start=node["start"], **kwargs)
        case "MultiDiscrete":
            dtype: Any = np.dtype(node["dtype"])
            return MultiDiscrete(np.array(node["nvec"], dtype), dtype, start=np.array(node["start"], dtype))
        case "Hybrid":
            return Hybrid(*(space_from_json(node[name]) for name in ("continuous", "discrete")))  # type: ignore[arg-type]
        case "MultiBinary":
            return MultiBinary(node["n"])
        case "Dict":
            return Dict([(key, space_from_json(sub)) for key, sub in node["spaces"]])
        case "Tuple":
            return Tuple([space_from_json(sub) for sub in node["spaces"]])
    raise ValueError(f"there is no space {node['type']!r}")


def _dtype(space: Space[Any]) -> str:
    dtype = np.dtype(space.dtype)
    return dtype.name if dtype.isnative else dtype.str


def _bounds(values: np.ndarray, bounded: np.ndarray, infinite: str) -> Any:
    """Return one number if all are equal, else a flat list; ``infinite`` marks missing bounds.

    An integer space without a bound holds its dtype's minimum or maximum there.
    """
    if (
        values.size
        and values.tobytes() == values.flat[0].tobytes() * values.size
        and (bounded.all() or not bounded.any())
    ):
        values, bounded = values.flat[:1], bounded.flat[:1]
        return values.item() if bounded.item() else infinite
    pairs = zip(values.ravel().tolist(), bounded.ravel().tolist(), strict=True)
    return [value if is_bounded else infinite for value, is_bounded in pairs]


def _array(bound: Any, shape: tuple[int, ...], dtype: np.dtype, infinite: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of all elements, and which elements are bounded."""
    row = bound if isinstance(bound, list) else [bound]
    bounded = np.array([not isinstance(value, str) for value in row], np.bool_)
    values = np.array([infinite if isinstance(value, str) else value for value in row], dtype)
    if isinstance(bound, list):
        return values.reshape(shape), bounded.reshape(shape)
    return np.full(shape, values[0]), np.full(shape, bounded[0])


def require_equal(spec: EnvSpec, other: EnvSpec, key: str) -> None:
    """Raise ``ConfigError`` of a key if the spaces of another environment differ; time limits may."""
    if difference := mismatch(spec, replace(other, max_episode_steps=spec.max_episode_steps)):
        raise ConfigError(key, f"changes the spaces that the policy is trained for: {difference}")

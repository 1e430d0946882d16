"""Extras: numbers from an environment's ``info`` that every row has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from rlplug.envs.checking import MisfitError, leaf_reader
from rlplug.envs.spaces import inside_obs
from rlplug.types import KEYS, Batch, ConfigError

OPTION = "env.info_keys"
SUCCESS = "is_success"  # whether an episode has reached its goal; the name is Gymnasium-Robotics'
STATE = "env_state"  # keeps its precision
RESERVED = {*KEYS, "restarted"} - {"state", STATE}


class Extras:
    """Reads the named keys of ``info``. The first reset determines their shapes and types.

    Floats become float32, like observations, except in ``env_state``; integers and bools do not change. Resets may omit
    ``is_success``: it is then a float, and 0 in an episode's first row.

    Args:
        keys: the keys, in order.
        info: the ``info`` of the environment's first reset.

    Raises:
        ConfigError: a key is reserved in batches, missing in ``info``, or not numeric.
    """

    def __init__(self, keys: Sequence[str], info: Mapping[str, Any]) -> None:
        self.spaces: dict[str, Space[Any]] = {}
        self._later = {SUCCESS: np.float32(0)} if SUCCESS in keys and SUCCESS not in info else {}
        info = {**info, **self._later}
        for key in keys:
            if key in RESERVED or key.startswith("final_"):
                raise ConfigError(OPTION, f"a batch already has the key {key!r}; rename it in the environment")
            if key not in info:
                known = f"has {', '.join(map(str, info))}" if info else "is empty"
                raise ConfigError(OPTION, f"the environment's info lacks {key!r} at the first reset: it {known}")
            if (space := space_of(info[key])) is None:
                said = f"info[{key!r}] is of type {type(info[key]).__name__}; expected a number or array"
                raise ConfigError(OPTION, said)
            exact = Box(-np.inf, np.inf, space.shape, np.float64)
            self.spaces[key] = exact if key == STATE else inside_obs(space)
        self._read: dict[str, Any] = {key: leaf_reader(f"info[{key!r}]", x) for key, x in self.spaces.items()}
        self._read |= {key: np.asarray for key in (STATE,) if key in keys}

    def write(self, rows: Batch, i: int, info: Mapping[str, Any], begins: bool = False) -> None:
        """Write the extras of ``info``, from a reset if ``begins``, to row ``i`` of ``rows``, ``[B, ...]`` each.

        Raises:
            MisfitError: a key is missing, or its shape or type differs from the first reset.
        """
        for key, read in self._read.items():
            if key in self._later:
                rows[key][i] = 0.0 if begins else float(info.get(key, 0.0))
                continue
            if key not in info:
                raise MisfitError(f"info lacks {key!r}, which {OPTION} names and the first reset had")
            rows[key][i] = read(info[key])


def space_of(value: Any) -> Space[Any] | None:
    """Return an unbounded space of a number or an array; None if the value is neither."""
    try:
        x = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    dtype: Any = np.dtype(x.dtype).type
    match x.dtype.kind:
        case "f":
            return Box(-np.inf, np.inf, x.shape, np.float32)
        case "b":
            return Box(0, 1, x.shape, dtype)
        case "i" | "u":
            limits: Any = np.iinfo(dtype)
            return Box(limits.min, limits.max, x.shape, dtype)
        case _:
            return None

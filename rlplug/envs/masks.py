"""Action masks of environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space

from rlplug.envs.checking import MisfitError
from rlplug.envs.spaces import inside_action
from rlplug.spaces import Hybrid
from rlplug.types import ConfigError


class Masks:
    """Reads the masks ``[A]`` of actions: ``A`` is ``n`` of a Discrete, ``sum(nvec)`` of a MultiDiscrete.

    Args:
        space: the inside counterpart of the environment's action space, its discrete part if that is hybrid.
        key: their key in ``info``.
    """

    def __init__(self, space: Discrete | MultiDiscrete, key: str) -> None:
        sizes = np.array([space.n]) if isinstance(space, Discrete) else space.nvec.ravel()
        self.key, self.size = key, int(sizes.sum())
        self._starts = np.cumsum(sizes) - sizes

    def read(self, info: Mapping[str, Any], final: bool, terminated: bool) -> np.ndarray:
        """Return the mask of one row, ``[A]`` bool. After an episode's end, a missing mask allows everything.

        Args:
            final: the row is the last one of an episode: no action follows.
            terminated: the episode terminated: no value is bootstrapped either.

        Raises:
            MisfitError: the mask is missing, has another size or type, or forbids every action.
        """
        given = info.get(self.key)
        if given is None:
            if final:
                return np.ones(self.size, np.bool_)
            raise MisfitError(f"info lacks {self.key!r}, which was there at the first reset")
        try:
            parts = [np.ravel(part) for part in given] if isinstance(given, tuple | list) else [np.ravel(given)]
            mask = np.concatenate(parts)
        except ValueError:
            raise MisfitError(f"{self.key} is of type {type(given).__name__}, not a mask") from None
        if mask.shape != (self.size,) or mask.dtype.kind not in "biu":
            raise MisfitError(
                f"{self.key} has {len(mask)} elements of type {mask.dtype}; the actions need {self.size} of type bool"
            )
        mask = mask.astype(np.bool_)
        if not np.logical_or.reduceat(mask, self._starts).all():
            if not terminated:
                raise MisfitError(f"{self.key} forbids every action")
            mask[:] = True
        return mask


def late(key: str) -> MisfitError:
    """Return the error for an environment whose first reset has no mask, but a later row does."""
    return MisfitError(
        f"info has {key!r}, which the first reset lacked; return it every time, or set env.mask_key=null"
    )


def find_masks(space: Space[Any], key: str | None, info: Mapping[str, Any]) -> Masks | None:
    """Return the reader of an environment's masks, or None if it has none.

    Args:
        space: the environment's action space.
        key: key of masks; None: there are none.
        info: the ``info`` of a reset.

    Raises:
        ConfigError: it has masks for an action space that does not support them.
    """
    if key is None or key not in info:
        return None
    inside = inside_action(space)
    if isinstance(inside := inside.discrete if isinstance(inside, Hybrid) else inside, Discrete | MultiDiscrete):
        return Masks(inside, key)
    raise ConfigError(
        "env.mask_key",
        f"the environment gives {key!r} for actions in {space}; masks support Discrete and MultiDiscrete actions;"
        " use env.mask_key=null to ignore them",
    )

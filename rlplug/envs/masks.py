"""Action masks: which actions an environment allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space

from rlplug.envs.checking import MisfitError
from rlplug.types import ConfigError


class Masks:
    """Reads the masks ``[A]`` of an action space: ``A`` is ``n`` of a Discrete, ``sum(nvec)`` of a MultiDiscrete.

    Args:
        key: what the environment calls them in its ``info``.
    """

    def __init__(self, space: Discrete | MultiDiscrete, key: str) -> None:
        sizes = np.array([space.n]) if isinstance(space, Discrete) else space.nvec.ravel()
        self.key, self.size = key, int(sizes.sum())
        self._starts = np.cumsum(sizes) - sizes

    def read(self, info: Mapping[str, Any], final: bool, terminated: bool) -> np.ndarray:
        """The mask of one row, ``[A]`` bool. After an end, everything is allowed where the environment says no more.

        Args:
            final: the row is the last one of an episode: nobody acts on it.
            terminated: nor asks what the best action would be.

        Raises:
            MisfitError: there is none, it has another size or type, or it forbids every action.
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
            raise MisfitError(f"{self.key} is of type {type(given).__name__}, and no mask") from None
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
    """What is wrong with an environment whose masks begin behind its first reset: it was taken for one without."""
    return MisfitError(f"info has {key!r}, which the first reset had not; give it at every reset, or env.mask_key=null")


def find_masks(space: Space[Any], key: str | None, info: Mapping[str, Any]) -> Masks | None:
    """The reader of an environment's masks; None where it gives none.

    Args:
        space: of the environment's actions.
        key: what masks are called; None: there are none.
        info: what the environment says at a reset.

    Raises:
        ConfigError: it gives masks for actions that have none.
    """
    if key is None or key not in info:
        return None
    if isinstance(space, Discrete | MultiDiscrete):
        return Masks(space, key)
    raise ConfigError(
        "env.mask_key",
        f"the environment gives {key!r} for actions in {space}; masks are for Discrete and MultiDiscrete actions,"
        " and env.mask_key=null leaves them out",
    )

"""Rows of all agents from what a caller observes, a step at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rlplug.types import Batch, EnvSpec


class TeamRows:
    """Builds the rows of environments with agents, and remembers who acted, and how.

    Args:
        keys: which of ``prev_action`` and ``prev_reward`` the rows have.
    """

    def __init__(self, spec: EnvSpec, keys: Collection[str]) -> None:
        self.spec, self._keys = spec, keys
        self._alive, self.actions = dict[str, Any](), dict[str, Any]()

    def row(self, obs: Mapping[str, Any], first: np.ndarray, alive: Any, mask: Any, reward: Any) -> Batch:
        """Return one row of ``n`` environments, arrays ``[n, N, ...]``, nested by group if there are several.

        Args:
            obs: of each group, as the policy sees it.
            first: environments that begin an episode, ``[n]`` bool.
            alive: by group, the agents that act, ``[N]`` or ``[n, N]`` bool; None: all.
            mask: by group, allowed actions, ``[N, A]`` or ``[n, N, A]`` bool, if the environment has masks.
            reward: by group, rewards of the last actions, ``[N]`` or ``[n, N]``.

        Raises:
            ValueError: masks or rewards are missing, or an array does not fit its group.
        """
        row: Batch = {"is_first": first}
        for name, group in self.spec.groups.items():
            shape = (len(first), *([len(group.agents)] if group.agents else []))
            acts = np.broadcast_to(True, shape) if alive is None else _of("alive", alive, name, shape, np.bool_)
            before = np.zeros(shape, np.bool_) if first.all() else (self._alive[name].T & ~first).T
            own = {"obs": obs[name], "alive": acts, "agent_is_first": acts & ~before}
            self._alive[name] = acts
            if "prev_reward" in self._keys:
                if reward is None and not first.all():
                    raise ValueError("this policy reads the rewards of the last actions: act(obs, reward={group: ...})")
                given = np.float32(0) if reward is None else _of("reward", reward, name, shape, np.float32)
                own["prev_reward"] = np.where((before.T & ~first).T, given, np.float32(0))
            if "prev_action" in self._keys:
                none = np.zeros((*shape, *(group.action.shape or ())), group.action.dtype)
                acted = before.reshape(*shape, *[1] * (none.ndim - len(shape)))
                own["prev_action"] = none if first.all() else np.where(acted, self.actions[name], none)
            if (space := (group if self.spec.nested else self.spec).extras.get("action_mask")) is not None:
                if mask is None:
                    raise ValueError("this policy was trained with action masks: act(obs, action_mask={group: ...})")
                own["action_mask"] = _of("action_mask", mask, name, (*shape, *(space.shape or ())[-1:]), np.bool_)
            row |= {name: own} if self.spec.nested else own
        return row


def _of(what: str, given: Any, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the array of a group, ``[N, ...]`` or ``[n, N, ...]``, for ``n`` environments."""
    if not isinstance(given, Mapping) or name not in given:
        raise ValueError(f"{what} should map each group to its array, but {name!r} is missing; got {given!r:.80}")
    array = np.asarray(given[name], dtype)
    if array.shape not in (shape, shape[1:]):
        raise ValueError(f"{what}[{name!r}] should be {[*shape[1:]]} or {[*shape]}, got {[*array.shape]}")
    return np.broadcast_to(array, shape)

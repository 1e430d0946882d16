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
            ValueError: masks or rewards are missing.
        """
        row: Batch = {"is_first": first}
        for name, group in self.spec.groups.items():
            shape = (len(first), *([len(group.agents)] if group.agents else []))
            acts = np.broadcast_to(True if alive is None else np.asarray(alive[name], np.bool_), shape)
            before = np.zeros(shape, np.bool_) if first.all() else (self._alive[name].T & ~first).T
            own = {"obs": obs[name], "alive": acts, "agent_is_first": acts & ~before}
            self._alive[name] = acts
            if "prev_reward" in self._keys:
                if reward is None and not first.all():
                    raise ValueError("this policy reads the rewards of the last actions: act(obs, reward={group: ...})")
                given = np.asarray(0 if reward is None else reward[name], np.float32)
                own["prev_reward"] = np.where((before.T & ~first).T, np.broadcast_to(given, shape), np.float32(0))
            if "prev_action" in self._keys:
                none = np.zeros((*shape, *(group.action.shape or ())), group.action.dtype)
                acted = before.reshape(*shape, *[1] * (none.ndim - len(shape)))
                own["prev_action"] = none if first.all() else np.where(acted, self.actions[name], none)
            if "action_mask" in (group if self.spec.nested else self.spec).extras:
                if mask is None:
                    raise ValueError("this policy was trained with action masks: act(obs, action_mask={group: ...})")
                allowed = np.asarray(mask[name], np.bool_)
                own["action_mask"] = np.broadcast_to(allowed, (*shape, allowed.shape[-1]))
            row |= {name: own} if self.spec.nested else own
        return row

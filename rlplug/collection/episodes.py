"""Returns and lengths of collected episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.functional.returns import ended as episodes_ended
from rlplug.functional.returns import episode_sums
from rlplug.host import on_cpu
from rlplug.types import Batch, Tree, groups_of

STREAM = ("valid", "is_first", "reward", "terminated", "truncated", "alive")


class EpisodeStats:
    """Computes returns and lengths of the episodes in a stream of segments ``[T+1, B]``.

    With several agents, the return is the mean over agents.

    Args:
        groups: groups of agents whose returns are also computed separately.

    Attributes:
        agent_steps: number of actions of agents so far; 0 if there is one agent.
    """

    def __init__(self, num_envs: int, groups: Sequence[str] = ()) -> None:
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._finished: list[tuple[float, int, int]] = []
        self.agent_steps = 0
        self.groups = {name: EpisodeStats(num_envs) for name in groups}

    def add(self, segment: Batch, columns: slice = slice(None)) -> int:
        """Add a segment of some columns, and return the number of its environment steps."""
        if not segment["valid"].is_cpu:
            segment = on_cpu(tree.only(segment, STREAM, self.groups))
        valid = segment["valid"].numpy()[:-1]
        began = segment["is_first"].numpy()[:-1] & valid  # after an end, or after an interrupted episode
        if "reward" in segment and "alive" not in segment:  # one agent
            over = segment["terminated"].numpy() | segment["truncated"].numpy()
            return self._count(segment["reward"].numpy()[:-1], valid, over[:-1] & valid, began, columns)
        ended, parts = episodes_ended(segment).numpy(), groups_of(segment).items()
        alive = [part["alive"].numpy()[:-1].reshape(*valid.shape, -1) for _, part in parts]
        self.agent_steps += int(np.concatenate(alive, 2)[valid].sum())
        rewards = {name: part["reward"].numpy()[:-1].reshape(*valid.shape, -1) for name, part in parts}
        for name, group in self.groups.items():
            group._count(rewards[name].mean(2), valid, ended, began, columns)
        return self._count(np.concatenate([*rewards.values()], 2).mean(2), valid, ended, began, columns)

    def _count(
        self, reward: np.ndarray, valid: np.ndarray, ended: np.ndarray, began: np.ndarray, columns: slice
    ) -> int:
        """Add rewards ``[T, B]``; masks mark rows with an action, rows that end and rows that begin an episode."""
        count, reward = int(np.count_nonzero(valid)), np.where(valid, reward, 0.0)
        if not np.count_nonzero(ended) and not np.count_nonzero(began):
            one = len(valid) == 1  # a sum takes 3 us
            self._return[columns] += reward[0] if one else reward.sum(0)
            self._length[columns] += valid[0] if one else valid.sum(0)
            return count
        opened = self._return[columns], self._length[columns]
        self._return[columns], self._length[columns], over = episode_sums(reward, valid, ended, began, *opened)
        names = range(len(self._return))[columns]
        self._finished += [(total, length, names[b]) for total, length, b in over]
        return count

    def add_whole(self, batch: Batch) -> None:
        """Add the episodes of a job, as environment -1: jobs have environments of their own."""
        alive = (part["alive"][batch["valid"]] for part in groups_of(batch).values() if "alive" in part)
        self.agent_steps += sum(int(x.sum()) for x in alive)
        for stats, totals in (self, batch["return"]), *((x, batch["returns"][n]) for n, x in self.groups.items()):
            stats._finished += zip(totals.tolist(), batch["length"].tolist(), [-1] * len(totals), strict=True)

    def drain(self) -> list[tuple[Any, ...]]:
        """Return (return, length, environment, return of every group) of the episodes ended since the last call.

        They are in time order.
        """
        finished, self._finished = self._finished, []
        by_group = [[episode[0] for episode in group.drain()] for group in self.groups.values()]
        return [(*episode, *returns) for episode, *returns in zip(finished, *by_group, strict=True)]

    def forget(self) -> None:
        """Drop open episodes, because their environments were reset."""
        for stats in (self, *self.groups.values()):
            stats._return[:] = stats._length[:] = 0

    def state(self) -> Tree:
        groups = {name: group.state() for name, group in self.groups.items()}
        own = {"finished": self._finished, "agent_steps": self.agent_steps}
        return {"return": self._return, "length": self._length, "groups": groups} | own

    def load(self, state: Tree) -> None:
        np.copyto(self._return, state["return"])
        np.copyto(self._length, state["length"])
        self.agent_steps = int(state["agent_steps"])
        envs = range(-1, len(self._return))  # -1: jobs
        self._finished = [(float(total), int(n), envs[env + 1]) for total, n, env in state["finished"]]
        for name, group in self.groups.items():
            group.load(state["groups"][name])

"""Single environments, stepped one after another in this process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from rlplug.envs.spaces import allocate, copy, equal, execute, observe, single_agent, write
from rlplug.types import Batch, Tree


class EnvList:
    """``B`` environments with equal spaces as one ``VecEnv``.

    Every episode has its own seed, drawn from the column's seed and the episode's number alone: it
    depends neither on the other columns nor on how earlier episodes went. So a column is restored
    by replaying the actions of its current episode.

    The arrays that ``reset`` and ``step`` return are overwritten by the next call.

    Args:
        envs: the environments; the list takes them over and closes them.
        max_episode_steps: after how many steps they truncate; None: never, or unknown.

    Raises:
        ConfigError: the environments have spaces that cannot be served.
    """

    lockstep = True

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], max_episode_steps: int | None = None) -> None:
        self.envs = list(envs)
        self.num_envs = n = len(self.envs)
        obs_space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.spec = single_agent(obs_space, action_space, max_episode_steps)
        self._observe, self._execute = observe(obs_space), execute(action_space)
        self._steps = [env.step for env in self.envs]
        self._obs = allocate(self.spec.sole.obs, n)
        self._reward = np.zeros(n, np.float32)
        self._terminated = np.zeros(n, np.bool_)
        self._truncated = np.zeros(n, np.bool_)
        self._final = [False] * n
        self._seeds: list[int] = []
        self._episodes = [0] * n
        self._actions: list[list[Any]] = [[] for _ in range(n)]

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin episode 0 of every column.

        Raises:
            ValueError: not one seed a column, or tasks for an environment that has none.
        """
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
        if tasks is not None:
            raise ValueError("this environment has no tasks")
        self._seeds = [int(seed) for seed in seeds]
        for i in range(self.num_envs):
            self._begin(i, 0)
        return {"obs": self._observe(self._obs)}

    def step(self, action: np.ndarray) -> Batch:
        """One step of every column; a column whose row is final begins its next episode instead."""
        obs, reward, terminated, truncated = self._obs, self._reward, self._terminated, self._truncated
        for i, (outside, inside) in enumerate(zip(self._execute(action), action.copy(), strict=True)):
            if self._final[i]:
                self._begin(i, self._episodes[i] + 1)
                reward[i], terminated[i], truncated[i] = 0.0, False, False
                continue
            row, reward[i], end, cut, _ = self._steps[i](outside)
            terminated[i], truncated[i] = end, cut
            self._final[i] = end or cut
            self._actions[i].append(inside)
            write(obs, i, row)
        return {"obs": self._observe(obs), "reward": reward, "terminated": terminated, "truncated": truncated}

    def state(self) -> Tree:
        """Each column's seed, episode and that episode's actions ``[L, ...]``; all columns' rows."""
        space = self.spec.sole.action
        return {
            "seeds": list(self._seeds),
            "episodes": list(self._episodes),
            "actions": [np.array(log, space.dtype).reshape(len(log), *(space.shape or ())) for log in self._actions],
            "obs": copy(self._obs),
        }

    def load(self, state: Tree) -> None:
        """Replay every column's current episode. Warns where an environment did not do the same again."""
        self._seeds = list(state["seeds"])
        for i, (episode, actions) in enumerate(zip(state["episodes"], state["actions"], strict=True)):
            self._begin(i, episode)
            self._actions[i] = list(actions)
            for outside in self._execute(actions):
                row, _, end, cut, _ = self._steps[i](outside)
                write(self._obs, i, row)
                self._final[i] = end or cut
                if self._final[i]:
                    break
        if not equal(self._obs, state["obs"]):
            warnings.warn(
                f"{self.envs[0]} is not deterministic: replayed with equal seeds and actions it reached another"
                " observation, so the run does not continue exactly as it would have",
                stacklevel=2,
            )

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _begin(self, i: int, episode: int) -> None:
        seed = int(np.random.SeedSequence([self._seeds[i], episode]).generate_state(1)[0])
        row, _ = self.envs[i].reset(seed=seed)
        write(self._obs, i, row)
        self._episodes[i], self._actions[i], self._final[i] = episode, [], False

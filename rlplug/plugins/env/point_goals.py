"""A point in the plane that has to find one of many goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from rlplug.api import Context, VecEnv
from rlplug.envs.checking import check_seeds, check_state
from rlplug.envs.spaces import single_agent
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, Tree

STEP, NEAR = 0.1, 0.01
"""largest step along an axis, and distance at which the goal is reached"""


class PointGoals(VecEnv):
    """2-D navigation: Finn et al. 2017 (arXiv:1703.03400), section 5.3.

    The point begins at the origin and observes its position, not the goal, which is the task. An action is its
    velocity. Every step costs the distance to the goal, and an episode terminates at the goal. Without tasks, goals are
    drawn uniformly, from the seed of the column and the number of the episode.

    Raises:
        ConfigError: rendering is requested.
    """

    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        size: PositiveFloat = option("Goals are in a square from -size to size.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "point_goals cannot render; use 0")
        self.cfg, self.num_envs = cfg, len(ctx.env_ids)
        plain = single_agent(
            Box(-np.inf, np.inf, (2,), np.float32), Box(-STEP, STEP, (2,), np.float32), cfg.max_episode_steps
        )
        self.spec = replace(plain, extras={"task": Box(-cfg.size, cfg.size, (2,), np.float32)})

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin an episode in every column.

        Raises:
            ValueError: there is not one seed per column.
        """
        check_seeds(seeds, self.num_envs)
        self._seeds, zeros = [int(seed) for seed in seeds], np.zeros((self.num_envs, 2), np.float32)
        self._at, self._goal, self._count = zeros, zeros.copy(), np.zeros(self.num_envs, np.int64)
        self._episode = np.full(self.num_envs, -1)
        self.assign(tasks)
        self._begin(np.ones(self.num_envs, np.bool_))
        return self._rows()

    def assign(self, tasks: Tree) -> None:
        self._next = np.full((self.num_envs, 2), np.nan, np.float32) if tasks is None else np.array(tasks, np.float32)

    def step(self, action: np.ndarray) -> Batch:
        """Move every point; a column whose row is final begins its next episode instead."""
        over = self._over
        move = STEP * np.clip(np.asarray(action, np.float32), -1.0, 1.0)
        self._at = np.where(over[:, None], self._at, self._at + move)
        self._count = np.where(over, self._count, self._count + 1)
        distance = np.linalg.norm(self._at - self._goal, axis=-1).astype(np.float32)
        terminated = ~over & (distance < NEAR)
        truncated = ~over & ~terminated & (self._count >= self.cfg.max_episode_steps)
        reward = np.where(over, np.float32(0.0), -distance)
        if over.any():
            self._begin(over)
        self._over = terminated | truncated
        return self._rows() | {"reward": reward, "terminated": terminated, "truncated": truncated}

    def _begin(self, where: np.ndarray) -> None:
        self._at, self._count = np.where(where[:, None], np.float32(0.0), self._at), np.where(where, 0, self._count)
        self._episode = self._episode + where
        for i in np.flatnonzero(where):
            drawn = np.random.default_rng([self._seeds[i], self._episode[i]])
            own = drawn.uniform(-self.cfg.size, self.cfg.size, 2)
            self._goal[i] = own if np.isnan(self._next[i]).any() else self._next[i]
        self._over = np.zeros(self.num_envs, np.bool_)

    def _rows(self) -> Batch:
        return {"obs": self._at, "task": self._goal.copy()}

    def state(self) -> Tree:
        """Return all that determines the next rows."""
        own = {"at": self._at, "goal": self._goal.copy(), "count": self._count, "episode": self._episode}
        return own | {"over": self._over, "seeds": self._seeds, "next": self._next}

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this environment.
        """
        check_state(self.state(), state, ("seeds", "count", "episode"))
        self._at, self._goal, self._count, self._episode, self._over, self._seeds, self._next = (
            state[key] for key in ("at", "goal", "count", "episode", "over", "seeds", "next")
        )

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

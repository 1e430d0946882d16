"""Environments that are vectors by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rlplug.envs.snapshot import restore, snapshot
from rlplug.envs.spaces import copy, execute, observe, row, single_agent, write
from rlplug.types import Batch, ConfigError, Tree


class NativeVector:
    """A ``gymnasium.vector.VectorEnv`` of any autoreset mode as a ``VecEnv``.

    ``NEXT_STEP`` gives one row a step. In ``SAME_STEP``, and in ``DISABLED``, where this adapter
    resets at once what has ended, an ended column has two rows at the end of one step: ``step``
    then returns the first observation of the new episode in ``obs``, and, whenever some column ended,
    ``final_obs [B, ...]``: the final observation there, ``obs`` in the other columns. A column that
    ended gets ahead of the others by one row: ``lockstep`` is False.

    A vector environment draws the episodes of a column from generators that go on from one episode
    to the next, mostly one for all columns: an episode has no seed of its own, and seeds of single
    columns are honoured only by gymnasium's own Sync- and AsyncVectorEnv. Where the environment's
    attributes can be read completely, ``state`` returns them.

    The arrays that ``reset`` and ``step`` return may be overwritten by the next call.

    Args:
        env: the environment; it is taken over and closed.
        max_episode_steps: after how many steps its episodes truncate; None: never, or unknown.

    Raises:
        ConfigError: the environment does not declare an autoreset mode, or has spaces that cannot be served.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], max_episode_steps: int | None = None) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                "env.id", f"{env} does not declare its autoreset mode: metadata['autoreset_mode'] is {mode!r}"
            )
        self.env = env
        # Actions come from a policy over this very space; asserting so is a sixth of the time of CartPole's step.
        vars(env.unwrapped.action_space)["contains"] = lambda action: True
        self.num_envs = env.num_envs
        self.spec = single_agent(env.single_observation_space, env.single_action_space, max_episode_steps)
        self.lockstep = mode is AutoresetMode.NEXT_STEP
        self._mode = mode
        self._observe = observe(env.single_observation_space)
        self._execute = execute(env.single_action_space)
        self._seed_each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin an episode in every column.

        Raises:
            ValueError: not one seed a column, or tasks for an environment that has none.
        """
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
        if tasks is not None:
            raise ValueError("this environment has no tasks")
        seeds = [int(seed) for seed in seeds]
        # All that VectorEnv.reset promises to take is one int; 31 bits, because some are C++ inside.
        one = int(np.random.SeedSequence(seeds).generate_state(1)[0]) >> 1
        obs, _ = self.env.reset(seed=seeds if self._seed_each else one)  # type: ignore[arg-type]
        return {"obs": self._observe(obs)}

    def step(self, action: np.ndarray) -> Batch:
        """One step of every column. See the class for ``final_obs``."""
        obs, reward, terminated, truncated, info = self.env.step(self._execute(action))
        batch = {
            "reward": np.asarray(reward, np.float32),
            "terminated": np.asarray(terminated, np.bool_),
            "truncated": np.asarray(truncated, np.bool_),
        }
        if not self.lockstep:
            ended = batch["terminated"] | batch["truncated"]
            if ended.any():
                if self._mode is AutoresetMode.DISABLED:
                    batch = copy(batch | {"final_obs": self._observe(obs)})  # the reset may write into these
                    obs, _ = self.env.reset(options={"reset_mask": ended})
                else:
                    last = copy(obs)
                    for i in np.flatnonzero(ended):
                        write(last, int(i), row(info["final_obs"], i))
                    batch["final_obs"] = self._observe(last)
        batch["obs"] = self._observe(obs)
        return batch

    def state(self) -> Tree | None:
        """The environment's attributes; None where they hold more than numbers, arrays and generators."""
        return snapshot(self.env)

    def load(self, state: Tree) -> None:
        restore(self.env, state)

    def close(self) -> None:
        self.env.close()

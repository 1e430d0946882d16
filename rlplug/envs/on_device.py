"""Environments whose dynamics are tensor operations: many columns on one device, without transfers to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Space
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, EnvTraits, Simulator, VecEnv
from rlplug.envs.checking import check_seeds
from rlplug.envs.device_metrics import DeviceMetrics
from rlplug.envs.spaces import single_agent
from rlplug.types import Batch, ConfigError, Tree

GOLDEN, MIX_1, MIX_2 = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""constants of SplitMix64 as signed integers, whose products wrap around equally"""
STATE = ("counter", "length", "over", "state")
"""tensors that determine the next rows"""


class OnDevice(VecEnv):
    """An environment with tensors on ``device``, the learner's. A subclass defines the dynamics.

    ``traceable = True`` in its class promises that ``initial``, ``move`` and ``observe`` depend only on their arguments
    and constants: on a CUDA device, whole rollouts are then captured in a CUDA graph and replayed.

    An ended column starts its next episode with the next step (``AutoresetMode.NEXT_STEP``). An episode's initial state
    depends only on its column's seed and its number, on every device and for any other columns. The state is in double
    precision, as in Gymnasium's environments.

    Every row has the extra ``env_state [B, S + 2]``: the state, the steps of the episode so far, and 1.0 where it
    terminated. The environment offers a simulator that continues from it.

    Args:
        obs, action: the environment's spaces.
        noise_size: number of uniform random numbers that determine an initial state.
        state_size: number ``S`` of numbers of a state; None: ``noise_size``.
        max_episode_steps: steps after which an episode is truncated.
        mask_size: number of actions, for an environment that defines ``allowed``; None: it has no masks.

    Raises:
        ConfigError: rendering is requested.
    """

    autoreset = AutoresetMode.NEXT_STEP
    traceable: ClassVar[bool] = False

    def __init__(
        self,
        ctx: Context,
        obs: Space[Any],
        action: Space[Any],
        noise_size: int,
        max_episode_steps: int,
        state_size: int | None = None,
        mask_size: int | None = None,
    ) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "environments on a device cannot render; use 0")
        self.device, self.num_envs, self.limit = ctx.device, len(ctx.env_ids), max_episode_steps
        self._metrics = DeviceMetrics()
        recorded = vars(type(self)).get("traceable", False)  # not inherited
        offers: Any = {"simulator": partial(DeviceSimulator, self), "metrics": self._metrics.drain}
        self.traits = EnvTraits(check_bounds=False, device=ctx.device, traceable=recorded, **offers)
        spec = single_agent(obs, action, max_episode_steps, mask_size=mask_size)
        state = Box(-np.inf, np.inf, ((state_size or noise_size) + 2,), np.float64)
        self.masked, self.spec = mask_size is not None, replace(spec, extras=spec.extras | {"env_state": state})
        self._draws = torch.arange(1, noise_size + 1, device=self.device).unsqueeze(-1) * GOLDEN
        self._stride = torch.tensor(noise_size, device=self.device) * GOLDEN

    def initial(self, noise: Tensor) -> Tensor:
        """Return initial states ``[S, B]``, from uniform noise ``[noise_size, B]`` in [0, 1)."""
        raise NotImplementedError(f"{type(self).__name__}.initial")

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next state ``[S, B]``, the reward ``[B]``, and whether the episode terminates, ``[B]``.

        This must be a pure function of ``state [S, B]`` and ``action [B, ...]``.
        """
        raise NotImplementedError(f"{type(self).__name__}.move")

    def observe(self, state: Tensor) -> Tensor:
        """Return the observation ``[B, ...]`` of a state ``[S, B]``, as a view or as new memory."""
        raise NotImplementedError(f"{type(self).__name__}.observe")

    def allowed(self, state: Tensor) -> Tensor:
        """Return which actions a state ``[S, B]`` that has not ended allows, ``[B, A]`` bool."""
        raise NotImplementedError(f"{type(self).__name__}.allowed")

    def measured(self, state: Tensor, over: Tensor) -> dict[str, Tensor]:
        """Return metrics of the environment's own by name, ``[B]``, of the states ``[S, B]`` that a step led to.

        Their means over the steps of an episode are logged. NaN: a column has none in this step. This must be a pure
        function.

        Args:
            over: whether the step ended the episode, ``[B]``.
        """
        return {}

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return reward and termination ``[B]`` of transitions, given only their observations, for learned dynamics.

        Raises:
            NotImplementedError: the environment does not offer it.
        """
        raise NotImplementedError(f"{type(self).__name__}.paid")

    def row(self, state: Tensor, length: Tensor, over: Tensor, terminated: Tensor) -> Batch:
        """Return ``obs`` and the extras ``[B, ...]`` of states ``[S, B]``; after the end, all actions are allowed."""
        numbers = torch.stack((length.to(state.dtype), terminated.to(state.dtype)))
        row = {"obs": self.observe(state).float(), "env_state": torch.cat((state.T, numbers.T), 1)}
        return row | ({"action_mask": self.allowed(state) | over.unsqueeze(-1)} if self.masked else {})

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start episode 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
        """
        check_seeds(seeds, self.num_envs)
        self._counter = first_counter(seeds, self.device)
        self._length = torch.zeros_like(self._counter)
        self._over = torch.zeros_like(self._counter, dtype=torch.bool)
        self._state = self.initial(self._noise())
        self._metrics.begin(self.measured(self._state, self._over))
        return self.row(self._state, self._length, self._over, self._over)

    def step(self, action: Tensor) -> Batch:
        """Step every column; a column whose row is final starts its next episode instead."""
        over, going = self._over, self._over.logical_not()
        moved, reward, terminated = self.move(self._state, action)
        self._counter += over * self._stride
        self._length.add_(1).mul_(going)
        torch.where(over, self.initial(self._noise()), moved, out=self._state)
        terminated = terminated & going
        truncated = (self._length >= self.limit) & terminated.logical_not()
        torch.logical_or(terminated, truncated, out=self._over)
        self._metrics.add(self.measured(self._state, self._over), going, self._over)
        said = {"reward": (reward * going).float(), "terminated": terminated, "truncated": truncated}
        return self.row(self._state, self._length, self._over, terminated) | said

    def state(self) -> Tree:
        """Return the state that determines the columns' next rows."""
        return {name: getattr(self, f"_{name}").clone() for name in STATE} | self._metrics.state()

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this environment.
        """
        if hasattr(self, "_state"):
            tree.check_like(self.state(), state, "env", exact=True)
        self._metrics.load(state)
        for name, values in tree.only(state, STATE).items():
            if (own := getattr(self, f"_{name}", None)) is None:
                setattr(self, f"_{name}", values.to(self.device, copy=True))
            else:  # a captured graph reads this memory
                own.copy_(values)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _noise(self) -> Tensor:
        """Return uniform numbers ``[noise_size, B]`` in [0, 1) that depend only on a column's seed and episode."""
        return uniform(self._counter + self._draws)


def first_counter(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return the counter ``[B]`` int64 of each column's SplitMix64 stream (Steele et al. 2014) before its first draw.

    Draw ``i``, from 1, is ``uniform(counter + i * GOLDEN)``.
    """
    own = np.array([int(seed) % 2**64 for seed in seeds], np.uint64).view(np.int64)
    return _mixed(torch.from_numpy(own).to(device) * GOLDEN)


def uniform(counter: Tensor) -> Tensor:
    """Return the uniform number in [0, 1) of every counter of a stream, as float64."""
    return (_mixed(counter) >> 11 & (1 << 53) - 1).double() * 2.0**-53


class DeviceSimulator(Simulator):
    """Steps an environment on a device from any ``env_state``."""

    def __init__(self, env: OnDevice) -> None:
        self.env = env

    def step(self, env_state: Tensor, action: Tensor) -> Batch:
        (*_, length, ended), before = env_state.unbind(-1), env_state[..., :-2].T
        state, reward, terminated = self.env.move(before, action)
        ended = (ended > 0) | (length >= self.env.limit)
        state = torch.where(ended, before, state)
        over = self.terminated({"next_env_state": env_state}) | (terminated & ~ended)
        length = torch.where(ended, length, length + 1)
        truncated = (length >= self.env.limit) & ~over
        said = {"reward": torch.where(ended, 0.0, reward).float(), "terminated": over, "truncated": truncated}
        return self.env.row(state, length, over | truncated, over) | said

    def reward(self, batch: Batch) -> Tensor:
        if "env_state" not in batch:
            return self.env.paid(batch["obs"], batch["action"], batch["next_obs"])[0]
        return self.step(batch["env_state"], batch["action"])["reward"]

    def terminated(self, batch: Batch) -> Tensor:
        if "next_env_state" not in batch:
            return self.env.paid(batch["obs"], batch["action"], batch["next_obs"])[1]
        return batch["next_env_state"][..., -1] > 0


def _mixed(x: Tensor) -> Tensor:
    """Return int64 numbers whose bits depend on all bits of ``x``: SplitMix64's finalizer."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)

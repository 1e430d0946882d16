"""A vectorized Acrobot-v1: Gymnasium only has the single environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.acrobot import AcrobotEnv
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

TORQUES = np.array(AcrobotEnv.AVAIL_TORQUE)
MOST = np.array([[AcrobotEnv.MAX_VEL_1], [AcrobotEnv.MAX_VEL_2]])


class AcrobotVector(VectorEnv[Any, Any, Any]):
    """Gymnasium's equations on arrays ``[4, B]``: two angles [rad] and their velocities.

    Initial states equal those of an ``EnvList`` with equal seeds. After a step, states differ by rounding: NumPy
    squares arrays exactly, and scalars by ``pow``.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  as Gymnasium declares it
    independent = True

    def __init__(self, num_envs: int = 1, max_episode_steps: int = 500, render_mode: str | None = None) -> None:
        one, self.render_mode = AcrobotEnv(), render_mode
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        self.observation_space = batch_space(one.observation_space, num_envs)
        self.action_space = batch_space(one.action_space, num_envs)
        self.seeds = np.zeros(num_envs, np.uint64)
        self.episodes, self.lengths = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self.angles, self.over = np.zeros((4, num_envs)), np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episode 0 of every column. ``seed``: one per column, or one from which theirs are derived."""
        if seed is None or isinstance(seed, int):
            seed = np.random.SeedSequence(seed).generate_state(self.num_envs)
        self.seeds = np.array([int(one) % 2**64 for one in seed], np.uint64)
        self.episodes[:] = 0
        obs = np.empty((self.num_envs, 6), np.float32)
        self._begin(range(self.num_envs), obs)
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        began, self.angles = self.over, _moved(self.angles, TORQUES[actions])
        self.lengths += 1
        first, second = self.angles[:2]
        terminated = (-np.cos(first) - np.cos(second + first) > 1.0) & ~began
        truncated = (self.lengths >= self.max_episode_steps) & ~began
        reward = np.where(terminated | began, np.float32(0.0), np.float32(-1.0))
        obs = _observed(self.angles)
        if began.any():
            which = np.flatnonzero(began)
            self.episodes[which] += 1
            self._begin(which, obs)
        self.over = terminated | truncated
        return obs, reward, terminated, truncated, {}

    def replay(self, seeds: Sequence[int], episodes: Sequence[int], actions: Sequence[np.ndarray]) -> None:
        """Restore the episodes of an ``EnvList``'s columns, after the actions ``[L]`` of each."""
        for i, (seed, episode, taken) in enumerate(zip(seeds, episodes, actions, strict=True)):
            one = AcrobotVector(1, self.max_episode_steps)
            one.reset(seed=[seed])
            one.episodes[:] = episode
            one._begin([0], np.empty((1, 6), np.float32))
            for action in taken:
                one.step(np.array([action]))
            for name in ("seeds", "episodes", "lengths", "over"):
                getattr(self, name)[i] = getattr(one, name)[0]
            self.angles[:, i] = one.angles[:, 0]

    def _begin(self, which: Any, obs: np.ndarray) -> None:
        """Start the episodes of some columns like ``EnvList`` and ``AcrobotEnv.reset``, and write observations."""
        for i in which:
            (seed,) = np.random.SeedSequence([int(self.seeds[i]), int(self.episodes[i])]).generate_state(1)
            start = np_random(int(seed))[0].uniform(low=-0.1, high=0.1, size=(4,)).astype(np.float32)
            self.angles[:, i] = start
            obs[i] = _observed(start[:, None])[0]
        self.lengths[which], self.over[which] = 0, False


def _moved(angles: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """Return the state after 0.2 s, by one step of the classical Runge-Kutta method, wrapped and bounded."""
    start, dt = np.concatenate([angles, torque[None]]), AcrobotEnv.dt
    k1 = _rates(start)
    k2 = _rates(start + dt / 2.0 * k1)
    k3 = _rates(start + dt / 2.0 * k2)
    k4 = _rates(start + dt * k3)
    moved = (start + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4))[:4]
    turned = moved[:2]
    while (high := turned > np.pi).any():
        turned -= 2 * np.pi * high
    while (low := turned < -np.pi).any():
        turned += 2 * np.pi * low
    np.clip(moved[2:], -MOST, MOST, out=moved[2:])
    return moved


EQUATIONS = AcrobotEnv.__new__(AcrobotEnv)
"""Gymnasium's functions, which also accept arrays"""


def _rates(state: np.ndarray) -> np.ndarray:
    """Return the derivative ``[5, B]`` of angles, velocities and the constant torque."""
    *rates, _ = EQUATIONS._dsdt(state)
    return np.stack([*rates, np.zeros_like(state[0])])


def _observed(angles: np.ndarray) -> np.ndarray:
    first, second, *rates = angles
    shown = [np.cos(first), np.sin(first), np.cos(second), np.sin(second), *rates]
    return np.stack(shown, -1, dtype=np.float32, casting="same_kind")

"""Environments in EnvPool's C++ threads, under their Gymnasium names."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlplug.envs.fire import FireVector, fire_of
from rlplug.envs.making import find
from rlplug.envs.native import NativeVector
from rlplug.types import ConfigError, RunError

NAMES = {"Taxi-v4": "Taxi-v3"}
"""Names that differ. (With its default arguments Taxi-v4 is what Taxi-v3 is.)"""
ENDLESS = ("CliffWalking",)
"""Environments without a time limit in EnvPool."""
MASKED = ("Taxi",)
"""Environments with action masks in Gymnasium, but not in EnvPool."""
ATARI = {"use_fire_reset": False, "reward_clip": False, "episodic_life": False, "repeat_action_probability": 0.25}
"""EnvPool options that make an Atari game equal to the one that ALE registers."""


def make_envpool(
    *,
    id: str,
    num_envs: int,
    kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    mask_key: str | None = None,
    atari: bool = False,
    frame_skip: int = 1,
    sticky_actions: float | None = None,
    fire: bool = False,
    frame_stack: int = 1,
    **options: Any,
) -> NativeVector:
    """Make ``num_envs`` environments of EnvPool.

    Args:
        id: as registered with Gymnasium.
        kwargs: EnvPool's options of the environment.
        max_episode_steps: None: EnvPool's default, mostly the one registered with Gymnasium.
        atari: preprocess images, which EnvPool requires for Atari, by ``frame_skip``, ``sticky_actions``, ``fire``
            and ``frame_stack``.
        options: ``drop``, ``select``, ``check_bounds`` and ``env_ids`` of ``NativeVector``.

    Raises:
        ConfigError: EnvPool is not installed, has no such environment, or does not support an option.
    """
    try:
        envpool: Any = import_module("envpool")
    except ImportError as error:
        raise ConfigError(
            "env.backend", f"EnvPool cannot be imported ({error}): pip install 'rlplug[envpool]'"
        ) from None

    given = dict(kwargs or {})
    name = _name(id, given, envpool.list_all_envs())
    if max_episode_steps is not None:
        given["max_episode_steps"] = max_episode_steps
    if atari != id.startswith("ALE/"):
        wrong = f"{id} is not an Atari environment" if atari else "EnvPool supports only standard Atari preprocessing"
        raise ConfigError("env.atari", f"{wrong}; use {'false' if atari else 'true'}")
    if atari:
        given = ATARI | {"frame_skip": frame_skip, "stack_num": frame_stack} | given
        if sticky_actions is not None:
            given["repeat_action_probability"] = sticky_actions
    else:
        wrapped = {
            "frame_skip": frame_skip > 1,
            "sticky_actions": sticky_actions,
            "fire": fire,
            "frame_stack": frame_stack > 1,
        }
        for key, asked in wrapped.items():
            if asked:
                raise ConfigError(f"env.{key}", "wraps single environments, but env.backend=envpool has none")
    if max_episode_steps is not None and name.startswith(ENDLESS):
        raise ConfigError("env.max_episode_steps", f"EnvPool has no step limit for {name}; use another env.backend")
    if mask_key is not None and name.startswith(MASKED):
        raise ConfigError("env.mask_key", f"EnvPool has no action masks for {name}; use null to run without masks")
    pool = Pool(name, num_envs, given)
    env = FireVector(pool, fire_of(gymnasium.make(find(id)))) if fire else pool
    return NativeVector(env, pool.max_episode_steps, frame_stack=frame_stack, mask_key=mask_key, **options)


class Pool(VectorEnv[Any, Any, Any]):
    """An environment of EnvPool as a vector environment that can be seeded more than once.

    Each column has its own generator, which continues over episodes. If an episode terminates in its last allowed step,
    EnvPool only reports truncation.

    Raises:
        ConfigError: EnvPool does not accept these options.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  as Gymnasium declares it

    def __init__(self, name: str, num_envs: int, options: Mapping[str, Any]) -> None:
        self.name, self.num_envs, self.options = name, num_envs, dict(options)
        self.pool: Any = self._make(0)
        self.single_observation_space = _unbound(self.pool.observation_space)
        self.single_action_space = self.pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        limit = self.pool.config["max_episode_steps"]
        self.max_episode_steps = None if limit == np.iinfo(np.int32).max else int(limit)
        self.over = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every column; with a seed, in a new pool, since EnvPool is seeded at construction."""
        if seed is not None:
            self.pool = None  # free it before making a new one
            self.pool = self._make(seed)
        self.over[:] = False
        return self.pool.reset()

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every column; an ended one starts its next episode instead.

        Raises:
            RunError: EnvPool continues an episode beyond ``max_episode_steps``.
        """
        obs, reward, terminated, truncated, info = self.pool.step(actions)
        if self.max_episode_steps and info["elapsed_step"].max() > self.max_episode_steps:
            raise RunError(f"EnvPool continues {self.name} beyond env.max_episode_steps; use another env.backend")
        reward = np.where(self.over, np.float32(0), reward)  # resets of the DeepMind Control suite have rewards
        self.over = terminated | truncated
        return obs, reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self.pool = None

    def _make(self, seed: int) -> Any:
        envpool: Any = import_module("envpool")
        seeds = ((seed + np.arange(self.num_envs)) % 2**31).tolist()
        try:
            pool: Any = envpool.make(
                self.name, env_type="gymnasium", num_envs=self.num_envs, seed=seeds, **self.options
            )
        except TypeError as error:
            spec: Any = envpool.make_spec(self.name)
            known = {k: v for k, v in zip(spec._config_keys, spec._config_values, strict=True) if k not in _POOL}
            unknown = [key for key in self.options if key not in (*known, *_POOL)]
            what = f"takes no {', '.join(unknown)}" if unknown else f"does not take {self.options}"
            names = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "nothing"
            raise ConfigError("env.kwargs", f"EnvPool's {self.name} {what}; it takes {names}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bounds rounded to float32; the spaces are cached
            _ = pool.observation_space, pool.action_space
        return pool


_POOL = (
    *("num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset", "base_path"),
    *("seed", "env_seed", "gym_reset_return_info", "max_episode_steps", "reward_threshold"),
)
"""EnvPool's options of every environment"""


def _name(id: str, kwargs: dict[str, Any], known: Sequence[str]) -> str:
    """Return EnvPool's name of the environment. Removes arguments that are part of the name from ``kwargs``."""
    name = id.rpartition(":")[2].removeprefix("ALE/")
    if name.startswith("LunarLander-") and kwargs.pop("continuous", False):
        name = name.replace("LunarLander-", "LunarLanderContinuous-")
    name = NAMES.get(name, name)
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, cutoff=0.7)
    hint = f"; the nearest that it has are {', '.join(near)}" if near else ""
    raise ConfigError("env.id", f"EnvPool has no {id}{hint}; registered ones need env.backend=gymnasium")


def _unbound(space: Space[Any]) -> Space[Any]:
    """Return a space without EnvPool's placeholders for missing bounds, the smallest positive and largest float."""
    if isinstance(space, Dict):
        return Dict({key: _unbound(sub) for key, sub in space.spaces.items()})
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        limits: Any = np.finfo(space.dtype)
        low = np.where(np.isin(space.low, (limits.tiny, limits.min)), -np.inf, space.low)
        high = np.where(space.high == limits.max, np.inf, space.high)
        return Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)  # type: ignore[arg-type]
    return space

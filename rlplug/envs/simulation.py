"""Simulators of single Gymnasium environments, for planning: set to a state exactly, or copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from torch import Tensor

from rlplug import tree
from rlplug.api import Simulator
from rlplug.envs.checking import writer
from rlplug.envs.env_list import EnvList, rows_of
from rlplug.envs.masks import find_masks
from rlplug.envs.spaces import columns, equal, execute
from rlplug.types import Batch, ConfigError, EnvSpec

Env: TypeAlias = gymnasium.Env[Any, Any]
Make: TypeAlias = Callable[[], Env]
Save: TypeAlias = Callable[[Env], Any]
Load: TypeAlias = Callable[[Env, Any], Any]
GOING, TERMINATED, TRUNCATED = range(3)
COPIES = 4096
"""copies of an environment that a simulator keeps"""
TRIED = 12
"""steps of an environment with which its copy is compared"""


def simulated(make: Make, save: Save, load: Load, num_envs: int, **options: Any) -> EnvList:
    """Return environments with a simulator, for environments whose state can be read and set exactly.

    Every row has the extra ``env_state [B, S + 2]``, float64: the steps of the episode so far, whether it continues
    (0), terminated (1) or was truncated (2), and what ``save`` returns.

    Args:
        make: makes an environment.
        save: returns the environment's whole state, a vector ``[S]``: numbers whose length does not change.
        load: sets an environment to a state, and returns its observation.
        options: further options of ``EnvList``.

    Raises:
        ConfigError: as ``EnvList``.
    """
    return _listed(partial(_with_state, make, save), partial(Stepper, make, save, load), num_envs, options)


def copied(make: Make, num_envs: int, max_episode_steps: int | None, **options: Any) -> EnvList:
    """Return environments with a simulator that copies them: slow, since every step copies a whole environment.

    Their state is the seed and the actions of the episode, so a lost copy is brought back by replaying them.
    A copy draws the same random numbers as its original, so a planner can predict random outcomes.

    Args:
        make: makes an environment.
        max_episode_steps: its limit, and so the length of its state.
        options: as for ``simulated``.

    Raises:
        ConfigError: copies do not continue as the environment does; its episodes have no limit; as ``EnvList``.
    """
    if max_episode_steps is None:
        raise ConfigError("env.simulator", "is copy, which needs a limit of steps: set env.max_episode_steps")
    logged = partial(_logged, make, max_episode_steps)
    _check_copies(logged, options.get("mask_key"))
    options["max_episode_steps"] = max_episode_steps
    return _listed(partial(_with_state, logged, _log), partial(Copier, logged, _log, _replay), num_envs, options)


def _listed(make: Make, simulator: Callable[[EnvSpec, str | None], Simulator], n: int, options: Any) -> EnvList:
    keys: Sequence[str] = options.pop("info_keys", ())
    env = EnvList([make() for _ in range(n)], info_keys=[*keys, "env_state"], **options)
    env.traits = replace(env.traits, simulator=partial(simulator, env.spec, options.get("mask_key")))
    return env


class WithState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds ``env_state`` to ``info``."""

    def __init__(self, env: Env, save: Save) -> None:
        super().__init__(env)
        self.save = save

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.steps = 0
        return obs, {**info, "env_state": self.state(GOING)}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        end = TERMINATED if terminated else TRUNCATED if truncated else GOING
        return obs, reward, terminated, truncated, {**info, "env_state": self.state(end)}

    def state(self, end: int) -> np.ndarray:
        return np.concatenate(([self.steps, end], np.asarray(self.save(self.env), np.float64)))


def _with_state(make: Make, save: Save) -> WithState:
    return WithState(make(), save)


class Stepper(Simulator):
    """Sets one environment to the state of each column in turn, and steps it."""

    def __init__(self, make: Make, save: Save, load: Load, spec: EnvSpec, mask_key: str | None) -> None:
        self.make, self.save, self.load, self.spec, self.mask_key = make, save, load, spec, mask_key
        self.env: WithState | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"env": None}

    def step(self, env_state: Any, action: Tensor) -> Batch:
        states, n = env_state.cpu().numpy(), len(action)
        rows = rows_of(self.spec, n)
        del rows["restarted"]
        if self.env is None:
            self.env = WithState(self.make(), self.save)
            self.env.reset()
        env = self.env
        write, own = writer(env.observation_space, rows["obs"]), execute(env.action_space)(action.cpu().numpy())
        for i, (state, one) in enumerate(zip(states, columns(own, n), strict=True)):
            if state[1] == GOING:
                self._step(rows, i, state, one, write)
            else:
                write(i, self.at(state)[1])
                rows["env_state"][i], rows["terminated"][i] = state, state[1] == TERMINATED
                rows["truncated"][i] = state[1] == TRUNCATED
        return tree.map(torch.from_numpy, rows)

    def _step(self, rows: Batch, i: int, state: np.ndarray, action: Any, write: Callable[[int, Any], None]) -> None:
        env, _ = self.at(state)
        obs, rows["reward"][i], terminated, truncated, info = env.step(action)
        rows["terminated"][i], rows["truncated"][i], rows["env_state"][i] = terminated, truncated, info["env_state"]
        write(i, obs)
        for key in self.spec.extras.keys() & info.keys() - {"env_state", self.mask_key}:
            rows[key][i] = info[key]
        if "action_mask" in rows and self.mask_key is not None:
            masks: Any = find_masks(env.action_space, self.mask_key, {self.mask_key: rows["action_mask"][i]})
            rows["action_mask"][i] = masks.read(info, terminated or truncated, terminated)
        self.keep(env, info["env_state"], obs)

    def at(self, state: np.ndarray) -> tuple[WithState, Any]:
        """Return the environment in a state, and its observation."""
        env: Any = self.env
        inner: Any = env
        while inner is not inner.unwrapped:
            if isinstance(inner, TimeLimit):
                inner._elapsed_steps = int(state[0])
            inner = inner.env
        env.steps = int(state[0])
        return env, self.load(env.env, state[2:])

    def keep(self, env: WithState, state: np.ndarray, obs: Any) -> None:
        """Note that the environment is in a state with this observation."""

    def reward(self, batch: Batch) -> Tensor:
        return self.step(batch["env_state"], batch["action"])["reward"]

    def terminated(self, batch: Batch) -> Tensor:
        return batch["next_env_state"][..., 1] == TERMINATED


class Copier(Stepper):
    """Steps copies of environments, the latest ``COPIES`` of which it keeps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = OrderedDict[bytes, tuple[WithState, Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"kept": OrderedDict()}

    def at(self, state: np.ndarray) -> tuple[WithState, Any]:
        if (key := state.tobytes()) not in self.kept:
            env = WithState(self.make(), self.save)
            env.reset()
            obs, env.steps = self.load(env.env, state[2:]), int(state[0])
            self.keep(env, state, obs)
        self.kept.move_to_end(key)
        env, obs = self.kept[key]
        return copy.deepcopy(env), obs

    def keep(self, env: WithState, state: np.ndarray, obs: Any) -> None:
        self.kept[state.tobytes()] = env, copy.deepcopy(obs)
        if len(self.kept) > COPIES:
            self.kept.popitem(last=False)


class Logged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps its episode as a vector ``[2 + limit * A]``: the seed, how many steps there were, and their actions."""

    def __init__(self, env: Env, limit: int) -> None:
        super().__init__(env)
        self.size = int(np.prod(env.action_space.shape or ()))
        self.log = np.zeros(2 + limit * self.size)

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.log[:] = 0.0
        self.log[0] = seed or 0.0
        return self.env.reset(seed=seed, **kwargs)

    def step(self, action: Any) -> Any:
        begin = 2 + int(self.log[1]) * self.size
        self.log[begin : begin + self.size] = np.ravel(action)
        self.log[1] += 1.0
        return self.env.step(action)


def _logged(make: Make, limit: int) -> Logged:
    return Logged(make(), limit)


def _log(env: Any) -> np.ndarray:
    return env.log.copy()


def _replay(env: Any, log: np.ndarray) -> Any:
    obs, _ = env.reset(seed=int(log[0]))
    space, end = env.action_space, 2 + int(log[1]) * env.size
    for action in log[2:end].reshape(-1, *(space.shape or ())).astype(space.dtype):
        obs, *_ = env.step(action)
    return obs


def _check_copies(make: Make, mask_key: str | None) -> None:
    """Check that copies of an environment continue as it does: some, by EzPickle, are new environments instead.

    Raises:
        ConfigError: they do not.
    """
    env: Any = make()
    space, name = env.action_space, env.spec.id if env.spec else type(env.unwrapped).__name__
    space.seed(0)

    def sample(info: Any) -> Any:
        mask = None if mask_key is None else info.get(mask_key)
        return space.sample() if mask is None else space.sample(mask=np.asarray(mask, np.int8))

    way = "write an environment with rlplug.envs.simulated(make, save, load), which reads and sets its state"
    said = f"is copy, but a copy of {name} does not continue where it was"
    *_, info = env.step(sample(env.reset(seed=0)[1]))
    try:
        other = copy.deepcopy(env)
        for _ in range(TRIED):
            action = sample(info)
            one, two = env.step(action), other.step(action)
            if not all(equal(x, y) for x, y in zip(one[:4], two[:4], strict=True)):
                raise ConfigError("env.simulator", f"{said}: it is a new environment; {way}")
            *_, terminated, truncated, info = one
            if terminated or truncated:
                break
    except ConfigError:
        raise
    except Exception as error:  # whatever its code raises
        raise ConfigError("env.simulator", f"{said} ({type(error).__name__}: {error}); {way}") from error
    finally:
        env.close()

"""Test environments: ``World-v0`` with every kind of space, ``Troop`` of two such agents, ``MaskedCartPole-v0`` with
action masks, ``FaultyCartPole-v0``, which fails, and ``SlowCartPole-v0``, which is slow.

``env.id=rlplug.testing.worlds:World-v0``
"""

from __future__ import annotations

import os
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

_VECTOR, _IMAGE = Box(-2.0, 2.0, (3,), np.float32), Box(0, 255, (6, 6, 3), np.uint8)
OBSERVATIONS: dict[str, Space[Any]] = {
    "vector": _VECTOR,
    "image": _IMAGE,
    "discrete": Discrete(5, start=1),
    "multi_discrete": MultiDiscrete([3, 2]),
    "multi_binary": MultiBinary(4),
    "dict": Dict({"image": _IMAGE, "goal": Discrete(3), "inner": Dict({"vector": _VECTOR})}),
    "tuple": Tuple((Discrete(4), _VECTOR)),
}
ACTIONS: dict[str, Space[Any]] = {
    "box": Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32)),
    "unbounded": Box(-np.inf, np.inf, (2,), np.float32),
    "discrete": Discrete(3, start=-1),
    "multi_discrete": MultiDiscrete([3, 2]),
    "multi_binary": MultiBinary(3),
}
NESTED: dict[str, Space[Any]] = {
    "dict": Dict({"move": Discrete(3, start=-1), "more": Tuple((MultiBinary(2), MultiDiscrete([2, 3])))}),
    "tuple": Tuple((Box(-2.0, 1.0, (2, 1), np.float32), Box(np.array([0.0], np.float32), np.inf, dtype=np.float32))),
    "hybrid": Dict(
        {
            "push": Discrete(3, start=-1),
            "steer": Tuple((Box(-2.0, 1.0, (2, 1), np.float64), MultiBinary(2))),
            "far": Box(np.array([0.0], np.float32), np.inf, dtype=np.float32),
        }
    ),
    "bounded": Tuple((MultiDiscrete([2, 3]), Box(np.array([0.0, -1.0], np.float32), np.array([4.0, 1.0], np.float32)))),
    "one": Dict({"move": Discrete(3, start=-1)}),
}


class World(gymnasium.Env[Any, Any]):
    """Random observations and rewards, in episodes of 3 to 8 steps: odd ones terminate, even ones truncate.

    It raises on invalid actions.

    Args:
        observation: a key of ``OBSERVATIONS``.
        action: a key of ``ACTIONS`` or ``NESTED``.
        mask: mask about half of the actions, different ones at every step.

    Raises:
        ValueError: from ``step``: the action is outside the space, or masked.
    """

    def __init__(self, observation: str = "vector", action: str = "discrete", mask: bool = False) -> None:
        self.observation_space, self.action_space = deepcopy(OBSERVATIONS[observation]), (ACTIONS | NESTED)[action]
        space: Any = self.action_space
        self.sizes = np.ravel(space.nvec if isinstance(space, MultiDiscrete) else space.n) if mask else np.zeros(0, int)
        self.masked, self.left, self.over = mask, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        length = int(self.np_random.integers(3, 9))
        self.left, self.over = length, length % 2 == 1
        return self._row()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"the action {action!r} is outside of {self.action_space}")
        if self.masked:
            chosen = np.ravel(action - getattr(self.action_space, "start", 0))
            if not all(part[i] for part, i in zip(self.mask, chosen, strict=True)):
                raise ValueError(f"the action {action!r} is forbidden by the mask {self.mask}")
        self.left -= 1
        end = self.left == 0
        obs, info = self._row()
        return obs, float(self.np_random.normal()), end and self.over, end and not self.over, info

    def _row(self) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        obs = self.observation_space.sample()
        if not self.masked:
            return obs, {}
        scores = [self.np_random.random(int(n)) for n in self.sizes]
        self.mask = [(part > 0.5) | (part == part.max()) for part in scores]
        return obs, {"action_mask": np.concatenate(self.mask).astype(np.int8)}


class Troop:
    """Two agents, each with a ``World`` of its own, as dicts by agent.

    An agent leaves when its episode ends. The second comes back two steps later, once, if the first is still there.

    Args:
        world: arguments of ``World``.
    """

    def __init__(self, **world: Any) -> None:
        self.possible_agents = ["first", "second"]
        self._worlds = {name: World(**world) for name in self.possible_agents}
        self.observation_space, self.action_space = (
            getattr(self._worlds["first"], f"{kind}_space") for kind in ("observation", "action")
        )
        self.state_space = Box(0.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        rows = {name: world.reset(seed=int(rng.integers(2**31))) for name, world in self._worlds.items()}
        self._alive, self._absent = {*rows}, 0
        return _apart(rows)

    def state(self) -> np.ndarray:
        """Return which agents are there."""
        return np.array([name in self._alive for name in self.possible_agents], np.float32)

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        results = {name: self._worlds[name].step(action) for name, action in actions.items()}
        rows = {name: (obs, info) for name, (obs, *_, info) in results.items()}
        flags = [{name: result[i] for name, result in results.items()} for i in (2, 3)]
        self._alive = {name for name in results if not (flags[0][name] or flags[1][name])}
        self._absent += "second" not in self._alive
        if self._absent == 2 and "first" in self._alive and "second" not in results:
            rows["second"] = self._worlds["second"].reset()
            self._alive |= {"second"}
        ends = [of | {"__all__": not self._alive} for of in flags]
        return _apart(rows)[0], {name: result[1] for name, result in results.items()}, *ends, _apart(rows)[1]


def _apart(rows: dict[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return observations and infos by agent."""
    return {name: obs for name, (obs, _) in rows.items()}, {name: info for name, (_, info) in rows.items()}


class MaskedCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 with ``2 * pairs`` actions: even ones push left, odd ones right. Each step allows one pair, in turn.

    Raises:
        ValueError: from ``step``: the action is masked.
    """

    def __init__(self, pairs: int = 4) -> None:
        super().__init__(gymnasium.make("CartPole-v1").unwrapped)
        self.pairs, self.action_space = pairs, Discrete(2 * pairs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, info | self._allow()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self.mask[action]:
            raise ValueError(f"the action {action} is forbidden by the mask {self.mask}")
        obs, reward, terminated, truncated, info = self.env.step(int(action) % 2)
        return obs, reward, terminated, truncated, info | self._allow()

    def _allow(self) -> dict[str, Any]:
        self.mask = np.zeros(2 * self.pairs, np.int8)
        self.mask[2 * self.env.unwrapped.np_random.integers(self.pairs, size=2) + [0, 1]] = 1
        return {"action_mask": self.mask}


class FaultyCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 that fails.

    Args:
        raises: probability that a step raises.
        malformed: probability that a step returns an observation of another shape.
        beyond: probability that a step returns an observation beyond the bounds of its space.
        hangs: a file; in the first environment that creates it, the first step after ``after`` never returns.
        after: steps of an environment before it can fail.

    Raises:
        OSError: from ``step``, as configured.
    """

    def __init__(
        self,
        raises: float = 0.0,
        malformed: float = 0.0,
        beyond: float = 0.0,
        hangs: str | None = None,
        after: int = 0,
    ) -> None:
        super().__init__(gymnasium.make("CartPole-v1").unwrapped)
        self.raises, self.malformed, self.beyond = raises, malformed, beyond
        self.hangs, self.after, self.steps = hangs, after, 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps > self.after:
            if self.hangs is not None and not Path(self.hangs).exists():
                Path(self.hangs).touch()
                time.sleep(1e6)
            luck = self.env.unwrapped.np_random.random()
            if luck < self.raises:
                raise OSError("the pole is stuck")
            if luck > 1.0 - self.malformed:
                return np.zeros(3, np.float32), 1.0, False, False, {}
            if luck > 1.0 - self.malformed - self.beyond:
                return np.array([4.85, 0, 0, 0], np.float32), 1.0, False, False, {}
        return self.env.step(action)


class SlowCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 whose steps sleep ``seconds``, times ``factor`` on ``slow_rank``; making it takes ``to_make``."""

    def __init__(
        self, seconds: float = 0.005, to_make: float = 0.0, slow_rank: int | None = None, factor: float = 5.0
    ) -> None:
        time.sleep(to_make)
        super().__init__(gymnasium.make("CartPole-v1").unwrapped)
        self.seconds = seconds * (factor if os.environ.get("RANK") == str(slow_rank) else 1.0)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return self.env.step(action)


def vector(num_envs: int, **options: Any) -> SyncVectorEnv:
    """Make a vector that resets within the step that ends an episode."""
    return SyncVectorEnv([lambda: World(**options)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


gymnasium.register("World-v0", entry_point=f"{__name__}:World", vector_entry_point=f"{__name__}:vector")
for made in (MaskedCartPole, FaultyCartPole, SlowCartPole):
    gymnasium.register(f"{made.__name__}-v0", entry_point=f"{__name__}:{made.__name__}", max_episode_steps=500)

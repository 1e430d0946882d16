"""An environment's rewards and terminations for goals chosen in hindsight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from rlplug.types import ConfigError

REWARD, TERMINATED = "compute_reward", "compute_terminated"


class EnvGoals:
    """Calls an environment's ``compute_reward`` and ``compute_terminated``, as in Gymnasium-Robotics' ``GoalEnv``.

    Both take achieved goals, desired goals and ``info``, which is empty here. Most environments accept batches of
    goals, arrays with a leading axis. Each function is tested on a small batch, and called for one transition at a time
    if the results differ.

    Args:
        env: the environment; it may be closed afterwards.

    Raises:
        ConfigError: its goals are not arrays, or its functions raise.
    """

    def __init__(self, env: Any) -> None:
        self.name = env.spec.id if env.spec else str(env)
        space: Any = env.observation_space["achieved_goal"]
        self.dtype, self.start = space.dtype, getattr(space, "start", 0)
        draws = deepcopy(space)  # keeps the environment's own generator unchanged
        draws.seed(0)
        some = [draws.sample() for _ in range(6)]
        pairs = np.asarray(some[:4]), np.asarray([*some[:2], *some[4:]])  # two transitions reach their goals
        self._reward = self._for_many(env.get_wrapper_attr(REWARD), *pairs)
        ends = env.has_wrapper_attr(TERMINATED)
        self._terminated = self._for_many(env.get_wrapper_attr(TERMINATED), *pairs) if ends else None

    def _for_many(self, function: Callable[..., Any], achieved: Any, desired: Any) -> Callable[[Any, Any], Any]:
        def each(achieved: Any, desired: Any) -> Any:
            return np.asarray([function(a, d, {}) for a, d in zip(achieved, desired, strict=True)])

        def every(achieved: Any, desired: Any) -> Any:
            return np.broadcast_to(function(achieved, desired, {}), len(achieved))

        called = f"{function.__name__} of {self.name}"
        try:
            wanted = each(achieved, desired)
        except Exception as error:
            said = f"raises {type(error).__name__}: {error}; it is given two goals and an empty info"
            raise ConfigError("env", f"{called} {said}") from error
        try:
            if np.allclose(every(achieved, desired), wanted):
                return every
        except Exception:  # it only accepts single goals
            pass
        print(f"rlplug: {called} accepts one goal at a time, which makes sampling slow", file=sys.stderr, flush=True)
        return each

    def reward(self, achieved: Any, desired: Any) -> Any:
        return self._reward(*self._outside(achieved, desired)).astype(np.float32)

    def terminated(self, achieved: Any, desired: Any) -> Any:
        return self._terminated and self._terminated(*self._outside(achieved, desired)).astype(np.bool_)

    def _outside(self, *goals: Any) -> tuple[Any, ...]:
        """Return goals in the format of the environment's own spaces."""
        goals = tuple(goal.astype(self.dtype, copy=False) for goal in goals)
        return tuple(goal + self.start for goal in goals) if np.any(self.start) else goals


def goals_of(env: Any) -> EnvGoals | None:
    """Return the ``EnvGoals`` of a ``gymnasium.Env``, or None if it has no ``compute_reward``."""
    return EnvGoals(env) if env.has_wrapper_attr(REWARD) else None

"""The ``VecEnv`` contract, on real episodes under random actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlplug.api import VecEnv
from rlplug.config import choose
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, options, require, some
from rlplug.testing.checks.settings import MISSING
from rlplug.trainer.context import RunContext, Scope
from rlplug.trainer.trees import decode, encode, snapshot
from rlplug.types import Batch, EnvSpec, map_leaves

COLUMNS, STEPS = 3, 1100
CORE = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}


def make(name: str, option: str | None = None, **changes: Any) -> VecEnv:
    """``COLUMNS`` environments of an option of the group ``env``; of the component's own one by default."""
    node = node_of("env", option or option_of("env", name), **changes)
    scope = Scope("learner", COLUMNS, range(COLUMNS))
    return choose("env", "env", node).build(RunContext(spec=EnvSpec({})).derive(scope=scope))


def complete(name: str) -> list[str]:
    """Options that select the environment and leave nothing to be given."""
    return [option for option in options("env", name) if MISSING not in node_of("env", option).values()]


def walk(env: VecEnv, seed: int, steps: int, actions: int = 0) -> Iterator[tuple[Batch, Any]]:
    """Rows under random actions, copied, each with the action that led to it (None: a reset)."""
    space = env.spec.sole.action
    space.seed(actions)
    yield map_leaves(np.array, env.reset([seed + i for i in range(COLUMNS)])), None
    for _ in range(steps):
        action = np.stack([space.sample() for _ in range(COLUMNS)])
        given = action.copy()
        row = map_leaves(np.array, env.step(action))
        require(np.array_equal(action, given), "step() changes the array of actions that it is given")
        yield row, given


def check_env(name: str, option: str | None = None, **changes: Any) -> None:
    """Spaces, shapes and types; episodes end and begin as the stream rule wants it; seeds decide everything."""
    env = make(name, option, **changes)
    spec, group = env.spec, env.spec.sole
    if getattr(group.action, "is_bounded", lambda: False)():
        low, high = group.action.low, group.action.high  # type: ignore[attr-defined]
        require((low == -1).all() and (high == 1).all(), "bounded actions lie in [-1, 1]: rescale them inside step()")
    length, over, ends = np.zeros(COLUMNS, np.int64), np.zeros(COLUMNS, np.bool_), 0
    for row, action in walk(env, 0, STEPS):
        for key in ("obs", *spec.extras):
            require(key in row, f"a row lacks {key!r}, which the spec names")
        for key in row.keys() & {"obs", "final_obs"}:
            _inside(key, row[key], group.obs)
        if action is None:
            continue
        for key, dtype in CORE.items():
            leaf = row[key]
            require(leaf.shape == (COLUMNS,), f"step() gives {key!r} with shape {leaf.shape}; wanted ({COLUMNS},)")
            require(leaf.dtype == dtype, f"step() gives {key!r} as {leaf.dtype}; wanted {np.dtype(dtype)}")
        ended = row["terminated"] | row["truncated"]
        require(np.isfinite(row["reward"]).all(), "a reward is not finite")
        if env.lockstep:
            require(not (ended & over).any(), "the step that resets an ended column ends it again")
            require((row["reward"][over] == 0).all(), "the step that resets an ended column gives a reward")
            length = np.where(over, 0, length + 1)
        else:
            require("final_obs" in row or not ended.any(), "a column ended, but step() gives no 'final_obs'")
            length = length + 1
        if spec.max_episode_steps:
            require((length <= spec.max_episode_steps).all(), f"an episode exceeds {spec.max_episode_steps} steps")
        ends, over = ends + int(ended.sum()), ended
        if not env.lockstep:
            length[ended] = 0
    if spec.max_episode_steps and spec.max_episode_steps < STEPS:
        require(ends, f"no episode ended within {STEPS} steps, although max_episode_steps is {spec.max_episode_steps}")
    _follows_its_seeds(env, make(name, option, **changes))
    env.close()


def _inside(key: str, leaf: Any, space: Any) -> None:
    for name, part in flat({key: leaf}).items():
        inner = space
        for word in name.split(".")[1:]:
            inner = inner[word]
        shape = (COLUMNS, *inner.shape)
        require(part.shape == shape, f"{name} has shape {part.shape}; wanted {shape}")
        require(part.dtype == inner.dtype, f"{name} is {part.dtype}; its space says {inner.dtype}")
        out = [row.tolist() for row in part if not inner.contains(row)]
        require(not out, f"{name} is outside of {inner}, such as {out[:1]}")


def _follows_its_seeds(env: VecEnv, twin: VecEnv) -> None:
    one, two, other = (list(walk(env, seed, 60)) for seed in (7, 7, 8))
    names = differences(one, two)
    require(not names, f"reset with equal seeds and stepped with equal actions it gives other rows ({some(names)})")
    require(differences([row for row, _ in one], [row for row, _ in other]), "other seeds give the same episodes")
    list(walk(env, 7, 30))
    state = snapshot(env.state())
    if state is None:
        return
    space = env.spec.sole.action
    space.seed(3)
    actions = [np.stack([space.sample() for _ in range(COLUMNS)]) for _ in range(20)]
    went_on = [map_leaves(np.array, env.step(action.copy())) for action in actions]
    list(walk(twin, 9, 13))
    twin.load(decode(encode(state)))  # as it comes out of a checkpoint
    again = [map_leaves(np.array, twin.step(action.copy())) for action in actions]
    names = differences(went_on, again)
    require(not names, f"another one that loads its state() does not continue as it did ({some(names)})")
    twin.close()

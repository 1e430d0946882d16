"""The ``VecEnv`` contract, on real episodes under random actions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.config import choose
from rlplug.context import EnvShard, RunContext
from rlplug.testing.checks.agents import check_agents
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, options, require, sample_actions, some
from rlplug.testing.checks.settings import MISSING
from rlplug.types import Batch, ConfigError, EnvSpec

COLUMNS, STEPS = 3, 1100
CORE = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
LAST = {"final_obs", "final_action_mask"}
"""what stands in a row only where a column ended, of environments that reset within the step that ends an episode"""


def make(name: str, option: str | None = None, **changes: Any) -> VecEnv:
    """``COLUMNS`` environments of an option of the group ``env``; of the component's own one by default."""
    node = node_of("env", option or option_of("env", name), **changes)
    shard = EnvShard("learner", COLUMNS, range(COLUMNS))
    return choose("env", "env", node).build(RunContext(spec=EnvSpec({})).derive(shard=shard))


def complete(name: str) -> list[str]:
    """Options that select the environment and leave nothing to be given."""
    return [option for option in options("env", name) if MISSING not in node_of("env", option).values()]


def walk(env: VecEnv, seed: int, steps: int, actions: int = 0) -> Iterator[tuple[Batch, Any]]:
    """Rows under random allowed actions, copied, each with the action that led to it (None: a reset)."""
    _seed(env, actions)
    row = tree.map(np.array, env.reset([seed + i for i in range(COLUMNS)]))
    yield row, None
    for _ in range(steps):
        action = draw(env, row)
        given = tree.map(np.copy, action)
        row = tree.map(np.array, env.step(action))
        require(not differences(action, given), "step() changes the array of actions that it is given")
        yield row, given


def _seed(env: VecEnv, seed: int) -> None:
    for group in env.spec.groups.values():
        group.action.seed(seed)


def draw(env: VecEnv, row: Batch) -> Any:
    """A random action for every column, one that ``row["action_mask"]`` allows where there is a mask."""
    if env.spec.has_agents:
        return sample_actions(env.spec, COLUMNS, row)
    space = env.spec.single_agent.action
    if "action_mask" not in row:
        return np.stack([space.sample() for _ in range(COLUMNS)])
    cuts = np.cumsum(space.nvec)[:-1] if isinstance(space, MultiDiscrete) else None
    masks = row["action_mask"].astype(np.int8)
    return np.stack([space.sample(mask=mask if cuts is None else tuple(np.split(mask, cuts))) for mask in masks])


def check_env(name: str, option: str | None = None, **changes: Any) -> None:
    """Spaces, shapes and types; episodes end and begin as the stream rule wants it; seeds decide everything.

    Warns where an option is for a package that is not installed: it is not checked.
    """
    try:
        env = make(name, option, **changes)
    except ConfigError as error:
        if "pip install" not in error.message:
            raise
        warnings.warn(f"the option {option!r} of env {name!r} is not checked: {error}", stacklevel=2)
        return
    if env.spec.has_agents:
        require(env.autoreset is AutoresetMode.NEXT_STEP, "with agents, columns are reset by the step behind their end")
        check_agents(env, walk(env, 0, STEPS), COLUMNS)
    else:
        _check_rows(env)
    _follows_its_seeds(env, make(name, option, **changes))
    env.close()
    if option in (None, complete(name)[0]) and _can(name, option, "subprocess"):
        _same_in_processes(*(make(name, option, **changes | {"vectorization": how}) for how in ("list", "subprocess")))


def _check_rows(env: VecEnv) -> None:
    spec, group = env.spec, env.spec.single_agent
    if getattr(group.action, "is_bounded", lambda: False)():
        low, high = group.action.low, group.action.high  # type: ignore[attr-defined]
        require((low == -1).all() and (high == 1).all(), "bounded actions lie in [-1, 1]: rescale them inside step()")
    length, over, ends = np.zeros(COLUMNS, np.int64), np.zeros(COLUMNS, np.bool_), 0
    for row, action in walk(env, 0, STEPS):
        named = {"obs", *spec.extras} | (CORE.keys() if action is not None else set())
        for key in named:
            require(key in row, f"a row lacks {key!r}" + (", which the spec names" if key not in CORE else ""))
        more = row.keys() - named - LAST - {"restarted"}
        require(not more, f"a row holds {some(sorted(more))}, which the spec does not name")
        for key in row.keys() & {"obs", "final_obs"}:
            _inside(key, row[key], group.obs)
        for key in row.keys() & {"action_mask", "final_action_mask"}:
            _allows(key, row[key], group.action, row.get("terminated", np.zeros(COLUMNS, np.bool_)))
        if action is None:
            continue
        for key, dtype in CORE.items():
            leaf = row[key]
            require(leaf.shape == (COLUMNS,), f"step() gives {key!r} with shape {leaf.shape}; wanted ({COLUMNS},)")
            require(leaf.dtype == dtype, f"step() gives {key!r} as {leaf.dtype}; wanted {np.dtype(dtype)}")
        ended = row["terminated"] | row["truncated"]
        require(np.isfinite(row["reward"]).all(), "a reward is not finite")
        if env.autoreset is AutoresetMode.NEXT_STEP:
            require(not (ended & over).any(), "the step that resets an ended column ends it again")
            require((row["reward"][over] == 0).all(), "the step that resets an ended column gives a reward")
            length = np.where(over, 0, length + 1)
        else:
            require("final_obs" in row or not ended.any(), "a column ended, but step() gives no 'final_obs'")
            length = length + 1
        if spec.max_episode_steps:
            require((length <= spec.max_episode_steps).all(), f"an episode exceeds {spec.max_episode_steps} steps")
        ends, over = ends + int(ended.sum()), ended
        if env.autoreset is not AutoresetMode.NEXT_STEP:
            length[ended] = 0
    if spec.max_episode_steps and spec.max_episode_steps < STEPS:
        require(ends, f"no episode ended within {STEPS} steps, although max_episode_steps is {spec.max_episode_steps}")


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


def _allows(key: str, mask: Any, space: Any, terminated: np.ndarray) -> None:
    sizes = np.array([space.n]) if isinstance(space, Discrete) else space.nvec
    shape = (COLUMNS, int(sizes.sum()))
    require(mask.shape == shape, f"{key!r} has shape {mask.shape}; wanted {shape}")
    require(mask.dtype == np.bool_, f"{key!r} is {mask.dtype}; wanted bool")
    allowed = np.logical_or.reduceat(mask, np.cumsum(sizes) - sizes, axis=1).all(1)
    require((allowed | terminated).all(), f"{key!r} forbids every action in a row that is acted on")


def _can(name: str, option: str | None, vectorization: str) -> bool:
    """Does the component offer this way of making a vector?"""
    config = choose("env", "env", node_of("env", option or option_of("env", name))).cls.Config
    return vectorization in get_args(get_type_hints(config).get("vectorization"))


def _same_in_processes(here: VecEnv, there: VecEnv) -> None:
    require(here.spec == there.spec, "in worker processes it has another spec than in this one")
    names = differences(list(walk(here, 7, 60)), list(walk(there, 7, 60)))
    require(not names, f"in worker processes equal seeds and actions give other rows than in this one ({some(names)})")
    here.close()
    there.close()


def _follows_its_seeds(env: VecEnv, twin: VecEnv) -> None:
    one, two = (list(walk(env, 7, 60)) for _ in range(2))
    names = differences(one, two)
    require(not names, f"reset with equal seeds and stepped with equal actions it gives other rows ({some(names)})")
    *_, (row, _) = walk(env, 7, 30)
    state = copy_to_host(env.state())
    if state is None:
        twin.close()
        return
    _seed(env, 3)
    actions: list[Any] = []
    went_on: list[Batch] = []
    for _ in range(20):
        actions.append(draw(env, row))
        row = tree.map(np.array, env.step(tree.map(np.copy, actions[-1])))
        went_on.append(row)
    list(walk(twin, 9, 13))
    twin.load(decode(encode(state)))  # as it comes out of a checkpoint
    again = [tree.map(np.array, twin.step(tree.map(np.copy, action))) for action in actions]
    names = differences(went_on, again)
    require(not names, f"another one that loads its state() does not continue as it did ({some(names)})")
    twin.close()

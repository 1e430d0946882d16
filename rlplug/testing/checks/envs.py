"""Checks of the ``VecEnv`` contract, on real episodes with random actions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.config import choose
from rlplug.context import EnvShard, RunContext
from rlplug.envs.episode_metrics import drained
from rlplug.testing.checks.devices import action_for, draw, rows_of
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, options, require, some
from rlplug.testing.checks.settings import MISSING
from rlplug.testing.checks.simulators import check_simulator
from rlplug.types import KEYS, Batch, ConfigError, EnvSpec, Group

COLUMNS, STEPS = 3, 1100
CORE = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
LAST = {"final_obs", "final_action_mask"}
"""keys that are only set for ended columns, in environments with autoreset in the same step"""


def make(name: str, option: str | None = None, **changes: Any) -> VecEnv:
    """Make ``COLUMNS`` environments of an option of the group ``env``; by default, the component's own."""
    node = node_of("env", option or option_of("env", name), **changes)
    shard = EnvShard("learner", COLUMNS, range(COLUMNS))
    return choose("env", "env", node).build(RunContext(spec=EnvSpec({})).derive(shard=shard))


def complete(name: str) -> list[str]:
    """Return the options that select the environment without missing values."""
    return [option for option in options("env", name) if is_complete(node_of("env", option))]


def is_complete(node: Mapping[str, Any]) -> bool:
    """Return whether no value is missing; an id and an entry point, or files and spaces, replace each other."""
    either = (("id", "entry_point"), ("path", "observation_space"))
    return MISSING not in node.values() and all(
        node.get(a, "") is not None or node.get(b) is not None for a, b in either
    )


def walk(env: VecEnv, seed: int, steps: int, actions: int = 0) -> Iterator[tuple[Batch, Any]]:
    """Yield copies of rows under random allowed actions, each with the preceding action (None: a reset)."""
    seed_actions(env, actions)
    row = rows_of(env, env.reset([seed + i for i in range(COLUMNS)]))
    yield row, None
    for _ in range(steps):
        action = draw(env, row)
        given = tree.map(np.copy, action)
        row = stepped(env, action)
        require(not differences(action, given), "step() changes the array of actions that it receives")
        yield row, given


def stepped(env: VecEnv, action: Any) -> Batch:
    """Return a copy of the next row; environments on a device get tensors."""
    return rows_of(env, env.step(action_for(env, action)))


def seed_actions(env: VecEnv, seed: int) -> None:
    for i, group in enumerate(env.spec.groups.values()):
        group.action.seed(seed + i)


def parts(spec: EnvSpec, row: Batch) -> list[tuple[str, Group, Batch]]:
    """Return every group's part of a row; a single group has the whole row, under an empty name."""
    if spec.nested:
        for name in spec.nested:
            require(isinstance(row.get(name), dict), f"a row lacks the dict of the group {name!r}")
        return [(name, group, row[name]) for name, group in spec.groups.items()]
    return [("", *spec.groups.values(), row)]  # type: ignore[list-item]


def check_env(name: str, option: str | None = None, **changes: Any) -> None:
    """Check spaces, shapes and dtypes, the stream rule at ends and starts of episodes, and determinism by seed.

    Warns about options for packages that are not installed, which are not checked.
    """
    try:
        env = make(name, option, **changes)
    except ConfigError as error:
        if "pip install" not in error.message:
            raise
        warnings.warn(f"the option {option!r} of env {name!r} is not checked: {error}", stacklevel=2)
        return
    spec = env.spec
    for group in spec.groups.values():
        if getattr(group.action, "is_bounded", lambda: False)():
            low, high = group.action.low, group.action.high  # type: ignore[attr-defined]
            said = "bounded actions lie in [-1, 1]: rescale them inside step()"
            require((low == -1).all() and (high == 1).all(), said)
    clash = {*spec.nested} & {*KEYS, *spec.extras}
    require(not clash, f"a group has the name of a batch key: {some(sorted(clash))}")
    require(
        not spec.has_agents or env.autoreset is AutoresetMode.NEXT_STEP,
        "an environment with agents must reset on the step after the end of an episode: AutoresetMode.NEXT_STEP",
    )
    length, over, ends = np.zeros(COLUMNS, np.int64), np.zeros(COLUMNS, np.bool_), 0
    alive: dict[str, Any] = {}  # by group, in the previous row
    for row, action in walk(env, 0, STEPS):
        given = CORE.keys() if action is not None else set[str]()
        own = {"obs", *given, *(["alive"] if spec.has_agents else [])}
        named = {*spec.extras, *(spec.nested or own)}
        for who, _, part in [("", None, row), *(parts(spec, row) if spec.nested else [])]:
            wanted = own | {*spec.groups[who].extras} if who else named
            place = f" of {who!r}" if who else ""
            for key in wanted:
                known = ", which the spec names" if key not in CORE else ""
                require(key in part, f"a row{place} lacks {key!r}{known}")
            more = part.keys() - wanted - LAST - (set[str]() if who else {"restarted"})
            require(not more, f"a row{place} holds {some(sorted(more))}, which the spec does not name")
        for who, group, part in parts(spec, row):
            _check_group(who, group, part, action is None, spec.has_agents)
            if spec.has_agents:
                _check_alive(who, part, alive.get(who), over)
        for key in spec.extras.keys() - {"action_mask"}:
            _inside(key, row[key], spec.extras[key])
        alive = {who: part["alive"].reshape(COLUMNS, -1) for who, _, part in parts(spec, row) if spec.has_agents}
        if action is None:
            continue
        if spec.has_agents:
            going = np.asarray(np.concatenate([*alive.values()], 1).any(1))
            require((going | ~over).all(), "the step that resets an ended column has no live agent in its first row")
            ended = np.asarray(~going)
        else:
            ended = np.asarray(row["terminated"] | row["truncated"])
        if env.autoreset is AutoresetMode.NEXT_STEP:
            require(not (ended & over).any(), "the step that resets an ended column ends it again")
            for _, _, part in parts(spec, row):
                said = "the step that resets an ended column gives a reward"
                require((part["reward"][over] == 0).all(), said)
            length = np.where(over, 0, length + 1)
        else:
            require("final_obs" in row or not ended.any(), "a column ended, but step() gives no 'final_obs'")
            length = length + 1
        if spec.max_episode_steps:
            require((length <= spec.max_episode_steps).all(), f"an episode exceeds {spec.max_episode_steps} steps")
        ends, over = ends + int(ended.sum()), ended
        if env.autoreset is not AutoresetMode.NEXT_STEP:
            length[ended] = 0
    reports = any(own for _, own in drained(env.traits))
    if spec.max_episode_steps and spec.max_episode_steps < STEPS:
        require(ends, f"no episode ended within {STEPS} steps, although max_episode_steps is {spec.max_episode_steps}")
    _follows_its_seeds(env, make(name, option, **changes))
    model = env.traits.simulator and env.traits.simulator()
    rows = [] if model is None or getattr(model, "hides", False) else list(walk(env, 11, 200))
    if reports:
        check_metrics(env, STEPS)
    env.close()
    if rows:
        check_simulator(env, model, rows)
    if option in (None, complete(name)[0]) and _can(name, option, "subprocess"):
        _same_in_processes(*(make(name, option, **changes | {"vectorization": how}) for how in ("list", "subprocess")))


def check_metrics(env: VecEnv, steps: int) -> None:
    """Check that ``traits.metrics`` has one entry for each episode that ended, unless all are without metrics."""
    reported, ended = list[tuple[int, dict[str, float]]](), list[int]()
    for row, action in walk(env, 5, steps):
        over = [part["terminated"] | part["truncated"] for _, _, part in parts(env.spec, row) if action is not None]
        if env.spec.has_agents:  # an episode ends with its last agent
            alive = np.concatenate([part["alive"].reshape(COLUMNS, -1) for _, _, part in parts(env.spec, row)], 1)
            over = [x.reshape(COLUMNS, -1).any(1) & ~alive.any(1) for x in over]
        ended += np.flatnonzero(np.logical_or.reduce([*over, np.zeros(COLUMNS, np.bool_)])).tolist()
        reported += drained(env.traits)
    said = "traits.metrics returns not one entry for each episode that ended, with {} for one without metrics"
    require([b for b, _ in reported] == ended or not any(own for _, own in reported), said)


def _check_group(name: str, group: Group, part: Batch, first: bool, has_agents: bool) -> None:
    """Check one group's part of a row: shapes, dtypes, and values inside its spaces."""
    columns = (COLUMNS, len(group.agents)) if group.agents else (COLUMNS,)
    where = f"{name}." if name else ""
    for key in part.keys() & {"obs", "final_obs"}:
        _inside(where + key, part[key], group.obs, columns)
    for key in group.extras.keys() - {"action_mask"}:
        _inside(where + key, part[key], group.extras[key], columns)
    for key in part.keys() & {"action_mask", "final_action_mask"}:
        idle = ~part["alive"] if has_agents else part.get("terminated", np.zeros(COLUMNS, np.bool_))
        _allows(where + key, part[key], group.action, idle, columns)
    core = {} if first else CORE
    for key, dtype in (core | ({"alive": np.bool_} if has_agents else {})).items():
        leaf = part[key]
        require(leaf.shape == columns, f"step() gives {where + key!r} with shape {leaf.shape}; expected {columns}")
        require(leaf.dtype == dtype, f"step() gives {where + key!r} as {leaf.dtype}; expected {np.dtype(dtype)}")
    if not first:
        require(np.isfinite(part["reward"]).all(), "a reward is not finite")


def _check_alive(name: str, part: Batch, before: Any, over: np.ndarray) -> None:
    """Check that an agent ends once, is not alive after its end, and does not disappear without an end.

    Args:
        before: agents alive in the previous row, ``[B, N]``; None: this is the first row.
        over: columns that were reset in this row.
    """
    if before is None:
        require(part["alive"].any(), "no agent is alive in the first row")
        return
    who = f"an agent of {name!r}" if name else "an agent"
    alive, ended = (x.reshape(COLUMNS, -1)[~over] for x in (part["alive"], part["terminated"] | part["truncated"]))
    before = before[~over]
    require(not (ended & ~before).any(), f"{who} that was not alive is terminated or truncated")
    require(not (ended & alive).any(), f"{who} is terminated or truncated, and alive in the next row")
    require(not (before & ~ended & ~alive).any(), f"{who} is not alive any more, but was not terminated or truncated")


def _inside(key: str, leaf: Any, space: Any, columns: tuple[int, ...] = (COLUMNS,)) -> None:
    for name, part in flat({key: leaf}).items():
        inner = space
        for word in name.removeprefix(key).split(".")[1:]:
            inner = inner[word]
        shape = (*columns, *inner.shape)
        require(part.shape == shape, f"{name} has shape {part.shape}; expected {shape}")
        require(part.dtype == inner.dtype, f"{name} is {part.dtype}; its space declares {inner.dtype}")
        out = [row.tolist() for row in part.reshape(-1, *inner.shape) if not inner.contains(row)]
        require(not out, f"{name} is outside of {inner}, such as {out[:1]}")


def _allows(key: str, mask: Any, space: Any, idle: np.ndarray, columns: tuple[int, ...]) -> None:
    sizes = np.array([space.n]) if isinstance(space, Discrete) else space.nvec
    shape = (*columns, int(sizes.sum()))
    require(mask.shape == shape, f"{key!r} has shape {mask.shape}; expected {shape}")
    require(mask.dtype == np.bool_, f"{key!r} is {mask.dtype}; expected bool")
    allowed = np.logical_or.reduceat(mask, np.cumsum(sizes) - sizes, axis=-1).all(-1)
    require((allowed | idle).all(), f"{key!r} forbids every action in a row that is acted on")


def _can(name: str, option: str | None, vectorization: str) -> bool:
    """Return whether the component supports this vectorization."""
    config = choose("env", "env", node_of("env", option or option_of("env", name))).cls.Config
    return vectorization in get_args(get_type_hints(config).get("vectorization"))


def _same_in_processes(here: VecEnv, there: VecEnv) -> None:
    require(here.spec == there.spec, "its spec in worker processes differs from that in this one")
    names = differences(list(walk(here, 7, 60)), list(walk(there, 7, 60)))
    require(not names, f"equal seeds and actions give different rows in worker processes ({some(names)})")
    here.close()
    there.close()


def _follows_its_seeds(env: VecEnv, twin: VecEnv) -> None:
    one, two = (list(walk(env, 7, 60)) for _ in range(2))
    names = differences(one, two)
    require(not names, f"equal seeds and actions give different rows ({some(names)})")
    *_, (row, _) = walk(env, 7, 30)
    state = copy_to_host(env.state())
    if state is None:
        twin.close()
        return
    seed_actions(env, 3)
    actions: list[Any] = []
    went_on: list[Batch] = []
    for _ in range(20):
        actions.append(draw(env, row))
        row = stepped(env, tree.map(np.copy, actions[-1]))
        went_on.append(row)
    list(walk(twin, 9, 13))
    before = copy_to_host(twin.state())
    twin.load(decode(encode(state)))  # as in a checkpoint
    idle = differences(before, state) and not differences(before, copy_to_host(twin.state()))
    require(not idle, "load() does nothing: state() is unchanged")
    again = [stepped(twin, tree.map(np.copy, action)) for action in actions]
    names = differences(went_on, again)
    require(not names, f"a second one that loads its state() continues differently ({some(names)})")
    twin.close()

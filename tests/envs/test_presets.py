"""Every file of conf/env makes its environment, which keeps its promises."""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space

from rlplug import tree
from rlplug.config import choose, default_node, option_names
from rlplug.envs import NativeVector

ROOMS = ("doorkey_5x5", "empty_5x5", "empty_16x16", "fetch_5x5", "fourrooms")
RUNNERS = ("halfcheetah_direction", "halfcheetah_velocity")
EXTRAS = {
    "box2d": ("Box2D", ("lunarlander", "lunarlander_continuous")),
    "mujoco": ("mujoco", ("halfcheetah", "hopper", "walker2d", "ant", "humanoid", "swimmer", *RUNNERS)),
    "atari": ("ale_py", ("atari", "pong", "breakout")),
    "minigrid": ("minigrid", ("minigrid", "doorkey_tasks", *(f"minigrid_{room}" for room in ROOMS))),
    "robotics": ("gymnasium_robotics", ("fetchreach",)),
    "recsim": ("recsim", ("recsim",)),
    "dmc": ("dm_control", ("dm_control", "dmc_cartpole_swingup", "dmc_walker_walk")),
}
GIVEN = {
    "gymnasium": {"id": "CartPole-v1"},
    "dm_control": {"domain": "cheetah", "task": "run"},
    "minigrid": {"id": "MiniGrid-GoToDoor-5x5-v0"},
}
TASKS = {
    "doorkey_tasks": Discrete(4, start=5),
    "frozenlake_tasks": Discrete(11, start=2),
    "halfcheetah_direction": Discrete(2),
    "halfcheetah_velocity": Box(0.0, 2.0, (1,), np.float32),
    "pendulum_mass": Box(0.5, 2.0, (1,), np.float32),
}
FIXED = ("cliffwalking", "frozenlake_12x12", "frozenlake_tasks", "minigrid_empty_5x5", "minigrid_empty_16x16")
"""nothing is drawn in them"""
MASKED = {"taxi": 6, "masked_cartpole": 8}
SUCCEEDING = {"is_success": Box(-np.inf, np.inf, (), np.float32)}
PRESETS = sorted(option for option in option_names("env"))
BUILT_IN = [
    option for option in PRESETS if default_node("env", option)["name"] in ("gymnasium", "dm_control", "minigrid")
]

image = Box(0, 255, (4, 84, 84), np.uint8)
minigrid = Dict({"direction": Discrete(4), "image": Box(0, 255, (7, 7, 3), np.uint8)})
door = Dict({**minigrid.spaces, "mission": MultiDiscrete([11] * 5)})  # go to the <one of 6 colors> door
fetch = Dict({**minigrid.spaces, "mission": MultiDiscrete([15] * 6)})


def numbers(n):
    return Box(-np.inf, np.inf, (n,), np.float32)


def torques(n):
    return Box(-1, 1, (n,), np.float32)


WANTED = {  # option: observation, action, steps
    "acrobot": (numbers(6), Discrete(3), 500),
    "ant": (numbers(105), torques(8), 1000),
    "atari": (image, Discrete(6), 27000),
    "blackjack": (Dict({"0": Discrete(32), "1": Discrete(11), "2": Discrete(2)}), Discrete(2), None),
    "breakout": (image, Discrete(4), 27000),
    "cartpole": (numbers(4), Discrete(2), 500),
    "cliffwalking": (Discrete(48), Discrete(4), 200),
    "fetchreach": (
        Dict({"observation": numbers(10), "achieved_goal": numbers(3), "desired_goal": numbers(3)}),
        torques(4),
        50,
    ),
    "dm_control": (Dict({"position": numbers(8), "velocity": numbers(9)}), torques(6), 1000),
    "dmc_cartpole_swingup": (Dict({"position": numbers(3), "velocity": numbers(2)}), torques(1), 1000),
    "dmc_walker_walk": (
        Dict({"orientations": numbers(14), "height": numbers(1), "velocity": numbers(9)}),
        torques(6),
        1000,
    ),
    "doorkey_tasks": (minigrid, Discrete(7), 640),
    "frozenlake": (Discrete(16), Discrete(4), 100),
    "frozenlake_12x12": (Discrete(144), Discrete(4), 22),
    "frozenlake_tasks": (Discrete(144), Discrete(4), 40),
    "gymnasium": (numbers(4), Discrete(2), 500),
    "halfcheetah": (numbers(17), torques(6), 1000),
    "halfcheetah_direction": (numbers(17), torques(6), 200),
    "halfcheetah_velocity": (numbers(17), torques(6), 200),
    "hopper": (numbers(11), torques(3), 1000),
    "humanoid": (numbers(348), torques(17), 1000),
    "lunarlander": (numbers(8), Discrete(4), 1000),
    "lunarlander_continuous": (numbers(8), torques(2), 1000),
    "masked_cartpole": (numbers(4), Discrete(8), 500),
    "minigrid": (door, Discrete(7), None),
    "minigrid_doorkey_5x5": (minigrid, Discrete(7), 250),
    "minigrid_empty_5x5": (minigrid, Discrete(7), 100),
    "minigrid_empty_16x16": (minigrid, Discrete(7), 60),
    "minigrid_fetch_5x5": (fetch, Discrete(7), 125),
    "minigrid_fourrooms": (minigrid, Discrete(7), 100),
    "mountaincar": (numbers(2), Discrete(3), 200),
    "mountaincar_continuous": (numbers(2), torques(1), 999),
    "pendulum": (numbers(3), torques(1), 200),
    "pendulum_mass": (numbers(3), torques(1), 200),
    "pendulum_no_velocity": (numbers(2), torques(1), 200),
    "pendulum_pixels": (Box(0, 255, (64, 64, 3), np.uint8), torques(1), 200),
    "pong": (image, Discrete(6), 27000),
    "recsim": (
        Dict(
            {"user": numbers(20), "documents": Box(-np.inf, np.inf, (10, 20)), "response": Dict({"click": Discrete(3)})}
        ),
        MultiDiscrete([10, 10]),
        1000,
    ),
    "stateless_cartpole": (numbers(2), Discrete(2), 500),
    "swimmer": (numbers(8), torques(2), 1000),
    "taxi": (Discrete(500), Discrete(6), 200),
    "walker2d": (numbers(17), torques(6), 1000),
}


def build(option, n=2, **changes):
    """``n`` environments of a preset; skips where its extra is not installed."""
    for extra, (module, options) in EXTRAS.items():
        if option in options and find_spec(module) is None:
            pytest.skip(f"{option} needs the extra {extra}")
    node = default_node("env", option, GIVEN.get(option, {}) | changes)
    return choose("env", "env", node).build(SimpleNamespace(env_ids=range(n), num_envs=n, render=False, role="actor"))


def sample(space, mask):
    """An action, among those that are allowed."""
    if mask is None:
        return space.sample()
    return np.random.default_rng(int(space.np_random.integers(2**31))).choice(np.flatnonzero(mask))


def walk(env, seed, steps):
    """Copies of the rows that follow ``reset`` under random actions, always the same, that the masks allow."""
    space = env.spec.single_agent.action
    space.seed(0)
    row = tree.map(np.array, env.reset([seed + i for i in range(env.num_envs)]))
    yield row
    for _ in range(steps):
        masks = row.get("action_mask", [None] * env.num_envs)
        row = tree.map(np.array, env.step(np.stack([sample(space, mask) for mask in masks])))
        yield row


def episode(env, seed, steps):
    """All that is said in ``steps`` steps, as bytes."""
    said = [leaf.tobytes() for row in walk(env, seed, steps) for leaf in tree.leaves(row)]
    env.close()
    return said


def shapes(space: Space):
    """A space without the bounds of its Boxes."""
    if isinstance(space, Dict):
        return {key: shapes(sub) for key, sub in space.spaces.items()}
    return (space.shape, space.dtype) if isinstance(space, Box) else space


def inside(space, obs, i):
    if isinstance(space, Dict):
        return all(inside(sub, obs[key], i) for key, sub in space.spaces.items())
    return space.contains(obs[i])


def test_the_table_names_all_presets():
    assert sorted(WANTED) == BUILT_IN
    assert {option for _, options in EXTRAS.values() for option in options} <= WANTED.keys()


@pytest.mark.parametrize("option", BUILT_IN)
def test_a_preset_holds_what_it_promises(option):
    obs, action, steps = WANTED[option]
    env = build(option)
    spec = env.spec
    assert shapes(spec.single_agent.obs) == shapes(obs)
    assert spec.single_agent.action == action
    assert spec.max_episode_steps == steps
    assert spec.frame_stack == (4 if obs is image else 1)
    extras = {"action_mask": MultiBinary(MASKED[option])} if option in MASKED else {}
    extras |= {"task": TASKS[option]} if option in TASKS else {}
    assert spec.extras == (SUCCEEDING if option == "fetchreach" else extras)
    length, over, ends = np.zeros(2, int), np.zeros(2, bool), 0
    horizon = 2 * steps + 2 if steps and steps <= 250 else 60
    for t, row in enumerate(walk(env, 0, horizon)):
        assert all(inside(spec.single_agent.obs, row["obs"], i) for i in range(2))
        assert row.keys() >= spec.extras.keys()
        if not t:
            continue
        assert all(row[key].shape == (2,) for key in ("reward", "terminated", "truncated"))
        assert row["reward"].dtype == np.float32
        assert np.isfinite(row["reward"]).all()
        ended = row["terminated"] | row["truncated"]
        assert not row["reward"][over].any()
        assert not ended[over].any()
        length = np.where(over, 0, length + 1)
        assert (row["truncated"] <= (length == steps)).all() if steps else not row["truncated"].any()
        assert (length <= (steps or np.inf)).all()
        over, ends = ended, ends + ended.sum()
    assert ends or horizon == 60, "no episode has ended"
    env.close()


@pytest.mark.parametrize("option", [option for option in BUILT_IN if option not in ("atari", "gymnasium")])
def test_seeds_decide_everything(option):
    first, again, other = (episode(build(option), seed, 40) for seed in (3, 3, 4))
    assert first == again
    assert (first == other) == (option in FIXED)


DISCRETE = [option for option in BUILT_IN if isinstance(WANTED[option][1], Discrete) and WANTED[option][0] is not image]


@pytest.mark.parametrize("option", DISCRETE)  # pixels have the whole range of their type
def test_no_action_leads_out_of_the_space_unless_the_preset_says_so(option):
    """A run warns of an observation outside of its space; the presets give no reason to."""
    env = build(option, 4)
    spec, beyond = env.spec.single_agent, False
    for action in range(spec.action.n):
        row = env.reset(range(4))
        for _ in range(120):
            if "action_mask" in row and not row["action_mask"][:, action].all():
                break
            row = env.step(np.full(4, action))
            beyond |= not all(inside(spec.obs, row["obs"], i) for i in range(4))
    assert env.traits.check_bounds == (option != "lunarlander")
    assert beyond == (option == "lunarlander")
    env.close()


def test_frozenlake_12x12_has_one_way_out_in_time():
    env = build("frozenlake_12x12", 1)
    env.reset([0])
    rows = [tree.map(np.array, env.step(np.array([action]))) for action in [2] * 11 + [1] * 11]
    assert [float(row["reward"][0]) for row in rows] == [0.0] * 21 + [1.0]
    assert (rows[-1]["terminated"][0], rows[-1]["obs"][0]) == (True, 143)
    row = env.step(np.array([2]))  # not a 23rd step
    assert (row["obs"][0], row["reward"][0], row["terminated"][0], row["truncated"][0]) == (0, 0.0, False, False)
    rows = [tree.map(np.array, env.step(np.array([action]))) for action in [2] * 11 + [0] + [1] * 10]  # one step lost
    assert [row["truncated"][0] for row in rows] == [False] * 21 + [True]
    assert not any(row["terminated"][0] or row["reward"][0] for row in rows)


@pytest.mark.parametrize(
    ("option", "whole"), [("stateless_cartpole", "cartpole"), ("pendulum_no_velocity", "pendulum")]
)
def test_velocities_are_hidden_and_nothing_else(option, whole):
    index = [0, 2] if option == "stateless_cartpole" else [0, 1]
    for seen, row in zip(walk(build(option), 5, 100), walk(build(whole), 5, 100), strict=True):
        assert np.array_equal(seen["obs"], row["obs"][:, index])
        assert all(np.array_equal(seen[key], row[key]) for key in row.keys() - {"obs"})
    assert isinstance(build("stateless_cartpole"), NativeVector)


@pytest.mark.parametrize("vectorization", ["native", "list"])
def test_a_stack_shifts_by_one_frame_and_begins_black(vectorization):
    """What the replay buffers rely on, in both kinds of vectors."""
    env = build("pong", vectorization=vectorization, max_episode_steps=6)
    last = tree.map(np.array, env.reset([0, 1])["obs"])
    assert not last[:, :3].any()
    assert last[:, 3].any()
    for t in range(20):
        obs = tree.map(np.array, env.step(np.full(2, t % 6))["obs"])
        if t % 7 == 6:
            assert not obs[:, :3].any()
        else:
            assert np.array_equal(obs[:, :3], last[:, 1:])
        last = obs
    env.close()

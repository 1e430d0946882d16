"""EnvPool as another backend: the same environments as Gymnasium's, in lock step."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.types import ConfigError
from tests.envs.test_presets import build, episode

pytest.importorskip("envpool", reason="needs rlplug[envpool]")

SAME = [
    *("cartpole", "stateless_cartpole", "pendulum", "pendulum_no_velocity", "acrobot", "mountaincar"),
    *("mountaincar_continuous", "lunarlander", "lunarlander_continuous", "frozenlake", "minigrid_doorkey_5x5"),
    *("minigrid_empty_5x5", "minigrid_fourrooms", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "swimmer"),
    *("atari", "pong", "breakout"),
]
"""presets that EnvPool plays too"""


def make(option, n=2, **changes):
    return build(option, n, backend="envpool", **changes)


@pytest.mark.parametrize("option", SAME)
def test_a_preset_is_the_same_as_of_gymnasium(option):
    pool, other = make(option), build(option, 2)
    spaces, wanted = pool.spec.single_agent, other.spec.single_agent
    assert pool.autoreset is AutoresetMode.NEXT_STEP
    assert pool.state() is None
    assert pool.spec.frame_stack == other.spec.frame_stack
    assert pool.spec.max_episode_steps == (other.spec.max_episode_steps or pool.spec.max_episode_steps)
    if option == "atari" or option in ("pong", "breakout"):
        assert pool.spec.max_episode_steps == 27000
    assert spaces.action == wanted.action
    if isinstance(wanted.obs, Box):
        assert (spaces.obs.shape, spaces.obs.dtype) == (wanted.obs.shape, wanted.obs.dtype)
    else:
        assert spaces.obs == wanted.obs
    other.close()
    pool.close()


@pytest.mark.parametrize("option", SAME)
def test_a_time_limit_truncates_and_the_step_after_it_resets(option):
    env = make(option, max_episode_steps=7)
    assert env.spec.max_episode_steps == 7
    space = env.spec.single_agent.action
    space.seed(0)
    env.reset([1, 2])
    over, length, cut = np.zeros(2, bool), np.zeros(2, int), 0
    for _ in range(40):
        row = env.step(np.stack([space.sample() for _ in range(2)]))
        assert (row["reward"][over] == 0).all()
        length = np.where(over, 0, length + 1)
        assert not (over & (row["terminated"] | row["truncated"])).any()
        assert (length <= 7).all()
        assert (row["truncated"] == (length == 7)).all()
        assert not (row["truncated"] & row["terminated"]).any()
        cut += row["truncated"].sum()
        over = row["terminated"] | row["truncated"]
    assert cut
    env.close()


@pytest.mark.parametrize("option", ["cartpole", "lunarlander", "minigrid_doorkey_5x5", "hopper", "pong"])
def test_seeds_decide_everything(option):
    rows = [episode(make(option), seed, 60) for seed in (5, 5, 6)]
    assert rows[0] == rows[1] != rows[2]


def test_the_stack_of_a_new_game_holds_its_first_frame_over_and_over():
    env = make("pong", 1, max_episode_steps=6)
    last = tree.map(np.array, env.reset([0])["obs"])
    for t in range(20):
        obs = tree.map(np.array, env.step(np.array([t % 6]))["obs"])
        if t % 7 == 6:
            assert all(np.array_equal(obs[0, i], obs[0, 3]) for i in range(3))
        else:
            assert np.array_equal(obs[:, :3], last[:, 1:])
        last = obs
    env.close()


def test_options_of_envpool_are_passed_on():
    assert make("frozenlake", kwargs={"size": 8}).spec.single_agent.obs == Discrete(64)
    env = make("pong", frame_skip=3, frame_stack=2, kwargs={"gray_scale": False})
    assert env.spec.single_agent.obs.shape == (6, 84, 84)
    assert (env.env.options["frame_skip"], env.env.options["repeat_action_probability"]) == (3, 0.0)
    assert make("pong", sticky_actions=None).env.options["repeat_action_probability"] == 0.25


@pytest.mark.parametrize(
    ("option", "changes", "key", "says"),
    [
        ("cartpole", {"id": "CartPole-v7"}, "env.id", "no CartPole-v7; the nearest that it has are CartPole-v1"),
        (
            "cartpole",
            {"id": "Qwxyz-v0"},
            "env.id",
            "EnvPool has no Qwxyz-v0; registered ones need env.backend=gymnasium",
        ),
        ("frozenlake_12x12", {}, "env.kwargs", "FrozenLake-v1 takes no is_slippery, desc; it takes size=4"),
        ("frozenlake", {"kwargs": {"size": "big"}}, "env.kwargs", "does not take {'size': 'big'"),
        ("cliffwalking", {}, "env.max_episode_steps", "no step limit for CliffWalking-v1"),
        ("taxi", {}, "env.mask_key", "no action masks for Taxi-v3; use null"),
        ("pong", {"atari": False}, "env.atari", "only standard Atari preprocessing; use true"),
        ("cartpole", {"atari": True}, "env.atari", "CartPole-v1 is not an Atari environment; use false"),
        ("pendulum", {"frame_skip": 2}, "env.frame_skip", "wraps single environments"),
        ("pendulum", {"sticky_actions": 0.5}, "env.sticky_actions", "wraps single environments"),
        ("minigrid_empty_5x5", {"frame_stack": 2}, "env.frame_stack", "wraps single environments"),
    ],
)
def test_what_envpool_does_not_do_is_refused(option, changes, key, says):
    with pytest.raises(ConfigError, match=says) as error:
        make(option, **changes)
    assert error.value.key == key

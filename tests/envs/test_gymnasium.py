import re
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from rlplug import testing
from rlplug.config import compose
from rlplug.envs import EnvList, NativeVector
from rlplug.plugins.env.gymnasium import Gymnasium
from rlplug.types import ConfigError
from tests.envs.making import gym


def test_what_an_environment_brings_is_preferred():
    assert isinstance(gym("CartPole-v1", 2), NativeVector)
    assert isinstance(gym("Pendulum-v1", 2), EnvList)
    assert isinstance(gym("CartPole-v1", 2, vectorization="list"), EnvList)
    assert gym("CartPole-v1", 3).num_envs == gym("Pendulum-v1", 3).num_envs == 3


def test_spec():
    spec = gym("Pendulum-v1").spec
    assert spec.single_agent.action == Box(-1, 1, (1,), np.float32)
    assert spec.single_agent.obs == Box(np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32))
    assert spec.max_episode_steps == 200


@pytest.mark.parametrize(("env_id", "vectorization"), [("CartPole-v1", "native"), ("CartPole-v1", "list")])
def test_max_episode_steps_and_kwargs_reach_the_environment(env_id, vectorization):
    options = {"vectorization": vectorization, "max_episode_steps": 3, "kwargs": {"sutton_barto_reward": True}}
    env = gym(env_id, 2, **options)
    assert env.spec.max_episode_steps == 3
    env.reset([0, 1])
    rows = [{k: v.copy() for k, v in env.step(np.zeros(2, np.int64)).items()} for _ in range(4)]
    assert [row["truncated"].tolist() for row in rows] == [[False, False]] * 2 + [[True, True], [False, False]]
    assert [row["reward"].tolist() for row in rows] == [[0, 0]] * 4


@pytest.fixture
def register():
    """Register environments for one test."""
    before = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("cartpole-v1", "did you mean CartPole-v1"),
        ("CartPole-v7", "its versions are CartPole-v0, CartPole-v1"),
        ("Pendulum", "its versions are Pendulum-v1"),
        ("Xyzzyx/Qwq-v0", "env.id=package:Xyzzyx/Qwq-v0"),
        ("Foo-v1", "nothing registered has a similar name"),  # the version alone is no likeness
        ("not an id", "there is no environment 'not an id'"),
        ("absent_package:Some-v0", "the module 'absent_package' cannot be imported"),
        ("HalfCheetah-v2", "gymnasium-robotics"),
        ("PognNoFrameskip-v4", "there is no Atari game 'Pogn'; did you mean Pong?"),
        ("BreakoutDeterministic-v4", "Gym's name of an Atari game; use env=atari env.id=ALE/Breakout-v5$"),
        ("BreakoutDeterministic-v0", r"use env=atari env.id=ALE/Breakout-v5 env.sticky_actions=0.25$"),
        ("Breakout-ram-v4", r"use env=gymnasium env.id=ALE/Breakout-v5 \+env.kwargs.obs_type=ram"),
        ("Foo-v4", "there is no environment 'Foo-v4'"),  # may be a game, and is none
    ],
)
def test_an_id_that_cannot_be_made_is_explained(env_id, says):
    with pytest.raises(ConfigError, match=says) as error:
        gym(env_id)
    assert error.value.key == "env.id"


def failing(error):
    def fail(action=None):
        raise error

    return fail


EXTRA = gymnasium.error.DependencyNotInstalled


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("absent_package.env:Env", "needs a package that is not installed: No module named 'absent_package'"),
        (failing(OSError("no licence")), "Own-v0 cannot be made: OSError: no licence"),
        (failing(EXTRA('Box2D is not installed, run `pip install "gymnasium[box2d]"`')), "pip install 'rlplug[box2d]'"),
        (
            failing(EXTRA("MuJoCo is not installed, run `pip install gymnasium[mujoco]`")),
            "pip install 'rlplug[mujoco]'",
        ),
    ],
)
def test_a_constructor_that_fails_is_explained(entry, said, register):
    register(id="Own-v0", entry_point=entry)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        gym("Own-v0")
    assert error.value.__cause__ is not None


def test_a_module_in_the_id_is_imported(tmp_path, monkeypatch, register):
    code = "gymnasium.register(id='Brought-v0', entry_point='tests.envs.walking:Walk', max_episode_steps=5)\n"
    (tmp_path / "brings_walk.py").write_text(f"import gymnasium\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    assert gym("brings_walk:Brought-v0").spec.max_episode_steps == 5


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
def test_arguments_contain_the_number_of_the_environment(vectorization):
    options = {"id": "Pendulum-v1", "kwargs": {"g": "{env_id}"}, "vectorization": vectorization}
    context = SimpleNamespace(env_ids=range(2, 5), num_envs=8, render=False, role="actor")
    env, action = Gymnasium(testing.config("env/gymnasium", **options), context), np.ones((3, 1), np.float32)
    singles = [gym("Pendulum-v1", 1, kwargs={"g": i}) for i in (2, 3, 4)]
    for one, seed in zip((env, *singles), ([7, 7, 7], [7], [7], [7]), strict=True):
        one.reset(seed)
    for _ in range(3):
        expected = [single.step(action[:1])["obs"][0].tolist() for single in singles]
        assert env.step(action)["obs"].tolist() == expected
    assert expected[0] != expected[1] != expected[2]
    env.close()


def test_an_environment_that_is_replaced_keeps_its_number():
    env = gym("Pendulum-v1", 3, kwargs={"g": "{env_id}"}, restart_failed=True)
    env.reset([1, 2, 3])
    failed = env.envs[2]
    env._steps[2] = failing(OSError("broken"))
    env.step(np.zeros((3, 1), np.float32))
    assert env.envs[2] is not failed
    assert [one.unwrapped.g for one in env.envs] == [0, 1, 2]


def test_numbers_are_of_single_environments():
    kwargs = {"kwargs": {"render_mode": None, "sutton_barto_reward": "{env_id}"}}
    assert isinstance(gym("CartPole-v1", **kwargs), EnvList)
    for options, key in [({"vectorization": "native"}, "env.vectorization"), ({"backend": "envpool"}, "env.kwargs")]:
        with pytest.raises(ConfigError, match=r"env_id\}, which applies to single environments") as error:
            gym("CartPole-v1", **kwargs, **options)
        assert error.value.key == key
    with pytest.raises(ConfigError, match=r"env.simulator: is copy, but env.kwargs differ"):
        gym("CartPole-v1", **kwargs, vectorization="list", simulator="copy")


class Louder(gymnasium.RewardWrapper):
    """Multiplies rewards."""

    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * float(reward)


def test_a_command_line_names_environment_and_wrappers_by_module():
    rewards = []
    for wrappers in ("[]", f"[{__name__}:Louder,{{entry_point:'{__name__}:Louder',kwargs:{{factor:5.0}}}}]"):
        words = ["algo=ppo", "env=tests.envs.walking:Walk", "env.max_episode_steps=5", f"env.wrappers={wrappers}"]
        config = compose(words)
        env = config.env.build(SimpleNamespace(env_ids=range(2), num_envs=2, render=False, role="actor"))
        assert env.spec.max_episode_steps == 5
        env.reset([0, 1])
        rewards.append(env.step(np.ones(2, np.int64))["reward"].copy())
    np.testing.assert_allclose(rewards[1], 10.0 * rewards[0], rtol=1e-6)
    assert (rewards[0] != 0).all()


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"kwargs": {"gravity": 3.0}}, "env.kwargs", "takes no 'gravity'; it takes render_mode, g"),
        ({"vectorization": "native"}, "env.vectorization", "no vector environment"),
        ({"vectorization": "native", "flatten": True}, "env.vectorization", "no vector environment"),
        ({"atari": True}, "env.atari", "Pendulum-v1 is not an Atari environment"),
        ({"fire": True}, "env.fire", "Pendulum-v1 has no action FIRE: it is not an Atari game; use false"),
        ({"frame_stack": 2}, "env.frame_stack", "only images are stacked, and the observation is a vector"),
        ({"drop": ["x"]}, "env.drop", "the observation has no 'x'; it has no keys"),
        ({"select": [3]}, "env.select", r"is \[3\]; give indices below 3"),
        ({"select": []}, "env.select", r"is \[\]; give indices below 3"),
        (
            {"backend": "envpool", "vectorization": "list"},
            "env.vectorization",
            "envpool is a native vector environment",
        ),
        ({"backend": "envpool", "flatten": True}, "env.flatten", "wraps single environments"),
    ],
)
def test_options_that_do_not_fit_are_explained(options, key, says):
    with pytest.raises(ConfigError, match=says) as error:
        gym("Pendulum-v1", **options)
    assert error.value.key == key


def test_a_native_vector_without_a_time_limit_says_so(register):
    def vector(num_envs):
        return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)

    register(id="Endless-v0", vector_entry_point=vector)
    with pytest.raises(ConfigError, match="takes no 'max_episode_steps'; it takes none") as error:
        gym("Endless-v0", max_episode_steps=9)
    assert error.value.key == "env.max_episode_steps"
    assert gym("Endless-v0", 3).num_envs == 3


def test_a_window_is_of_single_environments():
    for mode in ("human", "rgb_array"):
        env = gym("CartPole-v1", 1, kwargs={"render_mode": mode})  # which has a vector of its own
        assert isinstance(env, EnvList)
        assert env.envs[0].render_mode == mode
        env.close()
    assert isinstance(gym("CartPole-v1", 1, kwargs={"render_mode": None}), NativeVector)
    for options, key in (
        ({"vectorization": "native"}, "env.vectorization"),
        ({"backend": "envpool"}, "env.kwargs.render_mode"),
    ):
        with pytest.raises(ConfigError, match=r"render_mode.* a vector does not render") as error:
            gym("CartPole-v1", 1, kwargs={"render_mode": "human"}, **options)
        assert error.value.key == key

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium.spaces import Box, Discrete

from rlplug.envs import EnvList, NativeVector
from rlplug.plugins.env.gymnasium import Gymnasium
from rlplug.types import ConfigError

CONF = Path(__file__).parents[2] / "conf" / "env"


def make(env_id, n=1, **options):
    node = yaml.safe_load((CONF / "gymnasium.yaml").read_text()) | {"id": env_id} | options
    del node["name"]
    return Gymnasium(Gymnasium.Config(**node), SimpleNamespace(env_ids=range(n), num_envs=n, render=False))


def test_what_an_environment_brings_is_preferred():
    assert isinstance(make("CartPole-v1", 2), NativeVector)
    assert isinstance(make("Pendulum-v1", 2), EnvList)
    assert isinstance(make("CartPole-v1", 2, vectorization="list"), EnvList)
    assert make("CartPole-v1", 3).num_envs == make("Pendulum-v1", 3).num_envs == 3


def test_spec():
    spec = make("Pendulum-v1").spec
    assert spec.single_agent.action == Box(-1, 1, (1,), np.float32)
    assert spec.single_agent.obs == Box(np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32))
    assert spec.max_episode_steps == 200
    for vectorization in ("native", "list"):
        spec = make("CartPole-v1", vectorization=vectorization).spec
        assert spec.single_agent.action == Discrete(2)
        assert spec.single_agent.obs.shape == (4,)
        assert spec.max_episode_steps == 500


@pytest.mark.parametrize(("env_id", "vectorization"), [("CartPole-v1", "native"), ("CartPole-v1", "list")])
def test_max_episode_steps_and_kwargs_reach_the_environment(env_id, vectorization):
    options = {"vectorization": vectorization, "max_episode_steps": 3, "kwargs": {"sutton_barto_reward": True}}
    env = make(env_id, 2, **options)
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
        pytest.param(
            "LunarLander-v3",
            r"pip install 'rlplug\[box2d\]'",
            marks=pytest.mark.skipif(find_spec("Box2D") is not None, reason="Box2D is installed"),
        ),
        pytest.param(
            "ALE/Pong-v5",
            r"pip install 'rlplug\[atari\]'",
            marks=pytest.mark.skipif(find_spec("ale_py") is not None, reason="ale_py is installed"),
        ),
    ],
)
def test_an_id_that_cannot_be_made_is_explained(env_id, says):
    with pytest.raises(ConfigError, match=says) as error:
        make(env_id)
    assert error.value.key == "env.id"


def test_a_module_that_is_missing_is_named(register):
    register(id="Missing-v0", entry_point="absent_package.env:Env")
    with pytest.raises(ConfigError, match="needs a package that is not installed: No module named 'absent_package'"):
        make("Missing-v0")


def test_any_other_failure_of_a_constructor_is_chained(register):
    def fail():
        raise OSError("no licence")

    register(id="Failing-v0", entry_point=fail)
    with pytest.raises(ConfigError, match="Failing-v0 cannot be made: OSError: no licence") as error:
        make("Failing-v0")
    assert isinstance(error.value.__cause__, OSError)


def test_a_module_in_the_id_is_imported(tmp_path, monkeypatch, register):
    (tmp_path / "brings_walk.py").write_text(
        "import gymnasium\n"
        "gymnasium.register(id='Brought-v0', entry_point='tests.envs.walking:Walk', max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make("brings_walk:Brought-v0").spec.max_episode_steps == 5


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
        make("Pendulum-v1", **options)
    assert error.value.key == key


def test_a_native_vector_without_a_time_limit_says_so(register):
    def vector(num_envs):
        return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)

    register(id="Endless-v0", vector_entry_point=vector)
    with pytest.raises(ConfigError, match="takes no 'max_episode_steps'; it takes none") as error:
        make("Endless-v0", max_episode_steps=9)
    assert error.value.key == "env.max_episode_steps"
    assert make("Endless-v0", 3).num_envs == 3


def test_a_window_is_of_single_environments():
    for mode in ("human", "rgb_array"):
        env = make("CartPole-v1", 1, kwargs={"render_mode": mode})  # which has a vector of its own
        assert isinstance(env, EnvList)
        assert env.envs[0].render_mode == mode
        env.close()
    assert isinstance(make("CartPole-v1", 1, kwargs={"render_mode": None}), NativeVector)
    for options, key in (
        ({"vectorization": "native"}, "env.vectorization"),
        ({"backend": "envpool"}, "env.kwargs.render_mode"),
    ):
        with pytest.raises(ConfigError, match=r"render_mode.* a vector does not render") as error:
            make("CartPole-v1", 1, kwargs={"render_mode": "human"}, **options)
        assert error.value.key == key


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('Box2D is not installed, run `pip install "gymnasium[box2d]"`', "pip install 'rlplug[box2d]'"),
        ("MuJoCo is not installed, run `pip install gymnasium[mujoco]`", "pip install 'rlplug[mujoco]'"),
    ],
)
def test_a_missing_extra_is_our_own(register, said, hint):
    def fail():
        raise gymnasium.error.DependencyNotInstalled(said)

    register(id="Lacking-v0", entry_point=fail)
    with pytest.raises(ConfigError) as error:
        make("Lacking-v0")
    assert hint in str(error.value)

"""Tasks of the DeepMind Control suite behave as the suite itself does."""

import numpy as np
import pytest
from gymnasium.spaces import Box

from rlplug import tree
from rlplug.envs import EnvList, Subprocess
from rlplug.plugins.env.dm_control import _suite
from rlplug.types import ConfigError
from tests.envs.test_presets import build, walk

pytest.importorskip("dm_control", reason="needs rlplug[dmc]")


def make(domain="cartpole", task="swingup", n=2, **changes):
    return build("dm_control", n, domain=domain, task=task, **changes)


def test_an_episode_is_the_suites_own():
    env = make(n=1)
    env.reset([4])
    reference = _suite("cartpole", "swingup").load("cartpole", "swingup", task_kwargs={"random": 1})
    reference.reset()
    with reference.physics.reset_context():  # where the adapter's episode begins
        reference.physics.set_state(env.envs[0].unwrapped.env.physics.get_state())
    rng = np.random.default_rng(0)
    for _ in range(200):
        action = rng.uniform(-1, 1, (1, 1)).astype(np.float32)
        row, wanted = env.step(action), reference.step(action[0])
        assert row["obs"].keys() == wanted.observation.keys()
        for key, value in wanted.observation.items():
            assert row["obs"][key][0] == pytest.approx(value, rel=1e-6, abs=1e-6)
            assert row["obs"][key].dtype == np.float32
        assert row["reward"][0] == pytest.approx(wanted.reward, rel=1e-6)


@pytest.mark.parametrize("steps", [5, 1000])
def test_another_time_limit(steps):
    env = make(max_episode_steps=steps)
    assert env.spec.max_episode_steps == steps
    env.reset([1, 2])
    ends = [env.step(np.zeros((2, 1), np.float32))["truncated"].tolist() for _ in range(steps + 1)]
    assert ends == [[False] * 2] * (steps - 1) + [[True] * 2, [False] * 2]


def test_only_a_discount_of_zero_terminates():
    """An LQR ends for good where its state is at rest, and has no time limit."""
    env = make("lqr", "lqr_2_1", n=1)
    assert env.spec.max_episode_steps is None
    env.reset([0])
    inner = env.envs[0].unwrapped.env
    assert not env.step(np.zeros((1, 1), np.float32))["terminated"][0]
    with inner.physics.reset_context():
        inner.physics.set_state(np.zeros_like(inner.physics.get_state()))
    row = env.step(np.zeros((1, 1), np.float32))
    assert (row["terminated"][0], row["truncated"][0]) == (True, False)


def test_every_episode_has_a_seed_of_its_own():
    env = make(max_episode_steps=3)
    rows = [row["obs"]["position"] for row in walk(env, 0, 8)]
    again = [row["obs"]["position"] for row in walk(env, 0, 8)]
    assert np.array_equal(rows, again)
    assert not np.array_equal(rows[0], rows[4])  # the first rows of two episodes
    assert not np.array_equal(rows[0][0], rows[0][1])


def test_a_random_model_is_the_same_in_every_environment():
    env = make("lqr", "lqr_2_1", n=2)
    one, two = (single.unwrapped.env.physics.model.jnt_stiffness for single in env.envs)
    assert one.any()
    assert np.array_equal(one, two)


def test_subprocesses_play_the_same_episodes():
    one, other = make(n=2), make(n=2, vectorization="subprocess", workers=1)
    assert isinstance(one, EnvList)
    assert isinstance(other, Subprocess)
    try:
        for row, same in zip(walk(one, 7, 10), walk(other, 7, 10), strict=True):
            for a, b in zip(tree.leaves(row), tree.leaves(same), strict=True):
                assert np.array_equal(a, b)
    finally:
        other.close()


def test_a_state_that_is_loaded_goes_on():
    env, twin = make(), make()
    list(walk(env, 3, 20))
    state = env.state()
    action = np.full((2, 1), 0.3, np.float32)
    went_on = [tree.map(np.array, env.step(action)) for _ in range(10)]
    list(walk(twin, 9, 5))
    twin.load(state)
    for row in went_on:
        for a, b in zip(tree.leaves(row), tree.leaves(twin.step(action)), strict=True):
            assert np.array_equal(a, b)


def test_a_skipped_frame_is_a_step_of_the_task():
    one, skipping = make(n=1), make(n=1, frame_skip=4)
    assert skipping.spec.max_episode_steps == 250
    one.reset([0])
    skipping.reset([0])
    action = np.full((1, 1), 0.5, np.float32)
    rewards = [float(one.step(action)["reward"][0]) for _ in range(4)]
    assert skipping.step(action)["reward"][0] == pytest.approx(sum(rewards))


def renders():
    """Can the suite itself render here?"""
    try:
        _suite("cartpole", "swingup").load("cartpole", "swingup").physics.render(8, 8)
    except Exception:
        return False
    return True


def test_pixels():
    if not renders():
        pytest.skip("the suite cannot render here: there is neither a screen nor EGL")
    env = make(pixels=32, camera=1, frame_stack=3)
    assert env.spec.single_agent.obs == Box(0, 255, (9, 32, 32), np.uint8)
    assert env.spec.frame_stack == 3
    first = tree.map(np.array, env.reset([0, 1])["obs"])
    assert first[:, 6:].std() > 10
    assert not first[:, :6].any()
    second = tree.map(np.array, env.step(np.ones((2, 1), np.float32))["obs"])
    assert np.array_equal(second[:, 3:6], first[:, 6:])
    assert make(n=1, pixels=32).spec.single_agent.obs == Box(0, 255, (32, 32, 3), np.uint8)


def test_pixels_where_nothing_renders(monkeypatch):
    def nothing(*args, **kwargs):
        raise RuntimeError("no EGL")

    monkeypatch.setattr("dm_control.mujoco.engine.Physics.render", nothing)
    with pytest.raises(ConfigError, match=r"^env.pixels: rendering failed \(no EGL\)"):
        make(pixels=32)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"domain": "cartpol"}, "env.domain", "no domain 'cartpol'; it has acrobot, ball_in_cup, cartpole"),
        ({"task": "walk"}, "env.task", "cartpole has no task 'walk'; it has balance, balance_sparse, swingup"),
        ({"camera": 7}, "env.camera", "is 7, but cartpole has 2 cameras"),
        ({"frame_stack": 2}, "env.frame_stack", "only images are stacked"),
    ],
)
def test_what_there_is_not_is_said(changes, key, says):
    with pytest.raises(ConfigError, match=says) as error:
        make(**changes)
    assert error.value.key == key

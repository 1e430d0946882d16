"""CartPole's vector is Gymnasium's own, to the bit; Acrobot's is, to rounding."""

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlplug import tree
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.config import choose, default_node
from rlplug.context import EnvShard, RunContext
from rlplug.envs import EnvList, NativeVector
from rlplug.envs.acrobot import AcrobotVector, _moved
from rlplug.envs.cartpole import FEW, CartPoleVector
from rlplug.envs.making import find, has_native, make_list, make_native
from rlplug.types import EnvSpec


@pytest.mark.parametrize("n", [1, 8, FEW + 1])
def test_cartpole_steps_as_gymnasiums(n: int) -> None:
    ours, theirs = CartPoleVector(n, max_episode_steps=20), CartPoleVectorEnv(n, max_episode_steps=20)
    np.testing.assert_array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    rng, terminated, truncated = np.random.default_rng(0), 0, 0
    for t in range(300):
        action = rng.integers(2, size=n) if t % 100 < 50 else np.full(n, t % 2)  # balances for 20 steps
        mine, own = ours.step(action), theirs.step(action)
        for a, b in zip(mine[:4], own[:4], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        for name in ("state", "steps", "prev_done"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        terminated, truncated = terminated + mine[2].sum(), truncated + mine[3].sum()
    assert terminated
    assert truncated


def test_the_faster_vector_is_taken_and_its_options_are_served() -> None:
    env = make_native(find("CartPole-v1"), 2, {"sutton_barto_reward": True})
    try:
        assert isinstance(env.env.unwrapped, CartPoleVector)
        env.reset([0, 1])
        rewards = [env.step(np.ones(2, np.int64))["reward"] for _ in range(12)]
        assert np.min(rewards) == -1.0
    finally:
        env.close()


SPEC, SEEDS = find("Acrobot-v1"), [3, 1, 4, 1, 5, 9]


def play(env, actions):
    return [tree.map(np.array, env.step(action)) for action in actions]


def pumped(n, steps, seed=0):
    """Actions that hold for some steps, so that episodes end before their time, too."""
    rng = np.random.default_rng(seed)
    return np.repeat(rng.integers(0, 3, (steps // 5, n)), 5, 0)


def assert_alike(row, other, tolerance=1e-5):
    for key in ("reward", "terminated", "truncated"):
        np.testing.assert_array_equal(row[key], other[key])
    np.testing.assert_allclose(row["obs"], other["obs"], rtol=0, atol=tolerance)


def test_its_episodes_are_those_of_a_list():
    native, many = make_native(SPEC, 6, max_episode_steps=60), make_list(SPEC, 6, max_episode_steps=60)
    assert native.spec == many.spec
    np.testing.assert_array_equal(native.reset(SEEDS)["obs"], many.reset(SEEDS)["obs"])
    actions, ends = pumped(6, 300), {"terminated": 0, "truncated": 0}
    for row, other in zip(play(native, actions), play(many, actions), strict=True):
        assert_alike(row, other)
        for key in ends:
            ends[key] += row[key].sum()
    assert ends["truncated"] >= 10
    many.close()


def test_it_swings_up_and_ends():
    """By a torque in the direction of the second link's velocity."""
    native, many = make_native(SPEC, 6), make_list(SPEC, 6)
    rows = [env.reset(SEEDS) for env in (native, many)]
    terminated = 0
    for _ in range(500):
        action = 1 + np.sign(rows[0]["obs"][:, 5]).astype(np.int64)
        rows = [tree.map(np.array, env.step(action)) for env in (native, many)]
        assert_alike(*rows, tolerance=1e-3)
        terminated += rows[0]["terminated"].sum()
        assert (rows[0]["reward"] == np.where(rows[0]["terminated"], 0, -1))[~began(rows)].all()
    assert terminated >= 6
    many.close()


def began(rows):
    """Columns that have just begun an episode: their reward is 0, and they did not end."""
    return (rows[0]["reward"] == 0) & ~rows[0]["terminated"]


def test_its_equations_are_gymnasiums_step_by_step():
    env = gymnasium.make("Acrobot-v1").unwrapped
    env.reset(seed=0)
    rng = np.random.default_rng(1)
    high = np.array([np.pi, np.pi, 4 * np.pi, 9 * np.pi])
    starts, action = rng.uniform(-high, high, (200, 4)), rng.integers(0, 3, 200)
    moved = _moved(starts.T, action - 1.0)
    for start, taken, state in zip(starts, action, moved.T, strict=True):
        env.state = start
        env.step(int(taken))
        np.testing.assert_allclose(state, env.state, rtol=1e-12, atol=1e-12)
    assert (abs(moved[2]) == 4 * np.pi).any()
    assert (abs(moved[3]) == 9 * np.pi).any()


def test_a_column_does_not_depend_on_the_others():
    three, alone = (NativeVector(AcrobotVector(n, 40), 40) for n in (6, 1))
    assert three.traits.independent
    actions = pumped(6, 100)
    three.reset(SEEDS)
    alone.reset(SEEDS[2:3])
    for row, other in zip(play(three, actions), play(alone, actions[:, 2:3]), strict=True):
        assert all((row[key][2] == other[key][0]).all() for key in row)


def test_another_one_goes_on_from_its_state():
    env, twin = (make_native(SPEC, 6, max_episode_steps=40) for _ in range(2))
    env.reset(SEEDS)
    play(env, pumped(6, 100))
    state, actions = decode(encode(copy_to_host(env.state()))), pumped(6, 100, 1)
    wanted = play(env, actions)
    twin.load(state)
    for row, other in zip(play(twin, actions), wanted, strict=True):
        assert all(np.array_equal(row[key], other[key]) for key in row)


def test_it_goes_on_from_what_a_list_has_stored():
    """As in a checkpoint of a version that had no such vector."""
    many, native = make_list(SPEC, 6, max_episode_steps=60), make_native(SPEC, 6, max_episode_steps=60)
    many.reset(SEEDS)
    play(many, pumped(6, 60, 1))  # all are at their last row
    play(many, pumped(6, 90, 2))
    native.reset([0] * 6)
    native.load(many.state())
    actions = pumped(6, 100, 3)
    for row, other in zip(play(native, actions), play(many, actions), strict=True):
        assert_alike(row, other)
    many.close()


@pytest.mark.parametrize(("n", "kind"), [(5, EnvList), (6, NativeVector)])
def test_it_is_taken_where_it_pays(n, kind):
    """By the environments of the whole run, of which this process may have a few."""
    ctx = RunContext(spec=EnvSpec({})).derive(shard=EnvShard("learner", n, range(2)))
    env = choose("env", "env", default_node("env", "acrobot", {})).build(ctx)
    assert type(env) is kind
    assert len(env.env_ids) == 2
    env.close()
    assert has_native(find("CartPole-v1"), num_envs=1)
    assert not has_native(find("Pendulum-v1"))

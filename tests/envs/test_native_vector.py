import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorObservationWrapper
from gymnasium.wrappers.vector import NormalizeObservation

from rlplug import tree
from rlplug.envs import NativeVector
from rlplug.envs.spaces import equal
from rlplug.types import ConfigError
from tests.envs.walking import Walk, linear_policy, transitions

MAKERS = {
    "CartPole-v1": lambda: gymnasium.make("CartPole-v1", max_episode_steps=25),
    "Pendulum-v1": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=17),
    "Walk": Walk,
}


def sync(maker, mode, n=3, **kwargs):
    return NativeVector(SyncVectorEnv([maker] * n, autoreset_mode=mode, **kwargs))


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("shares_memory", [False, True])
def test_autoreset_modes_give_equal_transitions(maker, shares_memory):
    modes = {mode: sync(maker, mode, copy=not shares_memory) for mode in AutoresetMode}
    assert [env.autoreset is AutoresetMode.NEXT_STEP for env in modes.values()] == [True, False, False]
    next_step, *others = (transitions(env, [3, 1, 4], 200) for env in modes.values())
    for column in next_step:
        assert sum(terminated or truncated for *_, terminated, truncated, _ in column) >= 3
    for columns in others:
        for expected, column in zip(next_step, columns, strict=True):
            assert len(column) == 200 > len(expected)
            assert column[: len(expected)] == expected


def test_final_obs_is_there_only_when_a_column_ended():
    env = sync(MAKERS["CartPole-v1"], AutoresetMode.SAME_STEP)
    env.reset([0, 1, 2])
    for _ in range(60):
        row = env.step(np.ones(3, np.int64))
        assert ("final_obs" in row) == bool((row["terminated"] | row["truncated"]).any())


def cartpole():
    return gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")


class Delay(VectorObservationWrapper):
    """Shows every column the observation before: a wrapper with state."""

    def __init__(self, env):
        super().__init__(env)
        self.last = np.zeros(env.observation_space.shape, np.float32)

    def observations(self, observations):
        last, self.last = self.last, observations
        return last


@pytest.mark.parametrize("wrap", [lambda env: env, Delay], ids=["bare", "wrapped"])
@pytest.mark.parametrize("before", [0, 1, 40])
def test_a_loaded_state_continues_exactly(wrap, before):
    one, two = NativeVector(wrap(cartpole())), NativeVector(wrap(cartpole()))
    policy = linear_policy(one.spec.single_agent.action)
    row = one.reset([3, 1, 4, 1])
    for _ in range(before):
        row = one.step(policy(row["obs"]))
    state, obs = one.state(), tree.map(np.array, row["obs"])
    actions, rows = [], []
    for _ in range(100):
        actions.append(policy(obs))
        rows.append(tree.map(np.array, one.step(actions[-1])))
        obs = rows[-1]["obs"]
    assert sum(row["terminated"].sum() for row in rows) > 4
    for _ in range(2):  # the state survives its use
        two.load(state)
        assert all(equal(two.step(action), row) for action, row in zip(actions, rows, strict=True))


def with_attributes(**attributes):
    env = cartpole()
    env.reset(seed=0)
    for name, value in attributes.items():
        setattr(env, name, value)
    return NativeVector(env)


def test_state_is_refused_where_it_would_not_be_exact():
    shared = np.zeros(4)
    assert with_attributes(goal=shared, deep={"a": [1, (2.0, None)]}).state() is not None
    assert with_attributes(simulator=object()).state() is None
    assert with_attributes(goals=np.array([object()])).state() is None
    assert with_attributes(goal=shared, view=shared[1:]).state() is None
    env = with_attributes()
    env.env.second = env.env.np_random
    assert env.state() is None
    assert NativeVector(NormalizeObservation(cartpole())).state() is None
    assert sync(Walk, AutoresetMode.NEXT_STEP).state() is None


def test_containers_and_generators_are_restored():
    one = with_attributes(deep={"a": [1, (2.0, np.arange(3))]}, other=np.random.Generator(np.random.Philox(7)))
    two = with_attributes()
    two.load(one.state())
    assert two.env.deep["a"][0] == 1
    assert two.env.deep["a"][1][1].tolist() == [0, 1, 2]
    assert two.env.other.random() == one.env.other.random()


def test_wrong_arguments_are_refused():
    unlabelled = cartpole()
    unlabelled.metadata = {"render_modes": []}
    with pytest.raises(ConfigError, match="does not declare its autoreset mode") as error:
        NativeVector(unlabelled)
    assert error.value.key == "env.id"
    env = NativeVector(cartpole())
    with pytest.raises(ValueError, match="1 seeds for 4 environments"):
        env.reset([0])

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.envs import EnvList
from rlplug.envs.spaces import equal, execute, observe
from tests.envs.walking import Walk, flat, linear_policy, transitions

MAKERS = {
    "CartPole-v1": lambda: gymnasium.make("CartPole-v1"),
    "Pendulum-v1": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=17),
    "Walk": Walk,
}


@pytest.fixture(params=MAKERS)
def maker(request):
    return MAKERS[request.param]


def make(maker, n):
    return EnvList([maker() for _ in range(n)])


def brute_force(env, seed, steps):
    """Episode after episode by hand; row counts include the final ones, which a step leaves behind."""
    see = observe(env.observation_space)

    def batch(obs):
        return see({k: np.asarray([v]) for k, v in obs.items()} if isinstance(obs, dict) else np.asarray([obs]))

    act, policy = execute(env.action_space), linear_policy(env.action_space)
    out, episode = [], 0
    while steps > 0:
        obs, _ = env.reset(seed=int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]))
        ended = False
        while not ended and steps > 0:
            action = policy(batch(obs))
            after, reward, terminated, truncated, _ = env.step(act(action)[0])
            outcome = float(np.float32(reward)), bool(terminated), bool(truncated)
            out.append((flat(batch(obs))[0].tolist(), action[0].tolist(), *outcome, flat(batch(after))[0].tolist()))
            obs, ended = after, terminated or truncated
            steps -= 1
        episode, steps = episode + 1, steps - 1
    return out


def test_rows_are_those_of_single_environments(maker):
    seeds = [3, 1, 4]
    columns = transitions(make(maker, 3), seeds, 200)
    for seed, column in zip(seeds, columns, strict=True):
        assert column == brute_force(maker(), seed, 200)
        assert sum(terminated or truncated for *_, terminated, truncated, _ in column) >= 3


def test_equal_seeds_give_equal_episodes_whatever_the_other_columns(maker):
    together = transitions(make(maker, 3), [7, 8, 9], 60)
    assert together == transitions(make(maker, 3), [7, 8, 9], 60)
    assert together[1:2] == transitions(make(maker, 1), [8], 60)
    assert together[0] != together[1]


def test_the_step_after_a_final_row_ignores_its_action(maker):
    def run(other):
        env = make(maker, 1)
        policy = linear_policy(env.spec.single_agent.action)
        row, rows, final = tree.map(np.array, env.reset([0])), [], False
        for _ in range(80):
            action = policy(row["obs"])
            row = tree.map(np.array, env.step(np.zeros_like(action) if final and other else action))
            rows.append(row)
            if final:
                assert (row["reward"][0], row["terminated"][0], row["truncated"][0]) == (0.0, False, False)
            final = bool(row["terminated"][0] or row["truncated"][0])
        return rows

    assert all(equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("before", [0, 1, 17, 18, 53])
def test_a_loaded_state_continues_exactly(maker, before):
    one, two = make(maker, 3), make(maker, 3)
    policy = linear_policy(one.spec.single_agent.action)
    row = one.reset([3, 1, 4])
    for _ in range(before):
        row = one.step(policy(row["obs"]))
    obs = tree.map(np.array, row["obs"])
    two.load(one.state())
    for _ in range(40):
        action = policy(obs)
        a, b = one.step(action), two.step(action)
        assert equal(a, b)
        obs = tree.map(np.array, a["obs"])
    assert equal(one.state()["obs"], two.state()["obs"])
    assert one.state()["episodes"] == two.state()["episodes"]


def test_a_state_is_not_touched_by_later_steps():
    env = make(MAKERS["Pendulum-v1"], 2)
    env.reset([0, 1])
    action = np.full((2, 1), 0.5, np.float32)
    env.step(action)
    action[:] = -1
    state = env.state()
    obs = tree.map(np.array, state["obs"])
    env.step(action)
    assert state["actions"][0].tolist() == [[0.5]]
    assert equal(state["obs"], obs)


class Restless(Walk):
    """Draws from a generator that no seed reaches."""

    hidden = np.random.default_rng(0)

    def step(self, action):
        self.position = self.position + self.hidden.normal()
        return super().step(action)


def test_an_environment_that_cannot_be_replayed_is_reported():
    one, two = make(Restless, 1), make(Restless, 1)
    one.reset([0])
    one.step(np.zeros(1, np.int64))
    with pytest.warns(UserWarning, match="not deterministic"):
        two.load(one.state())


def test_spec_and_dtypes():
    env = make(Walk, 2)
    row = env.reset([0, 1])
    assert row["obs"]["position"].dtype == np.float32
    row = env.step(np.array([0, 1]))
    assert {key: row[key].dtype.name for key in ("reward", "terminated", "truncated")} == {
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
    }
    assert env.autoreset is AutoresetMode.NEXT_STEP


def test_seeds_must_fit():
    env = make(Walk, 2)
    with pytest.raises(ValueError, match="1 seeds for 2 environments"):
        env.reset([0])


def test_an_episode_too_long_to_be_replayed_has_no_state(monkeypatch, recwarn):
    monkeypatch.setattr("rlplug.envs.seeded.LONGEST", 10)
    env = EnvList([gymnasium.make("Pendulum-v1", max_episode_steps=13) for _ in range(2)])
    env.reset([0, 1])
    there = []
    for _ in range(16):
        env.step(np.zeros((2, 1), np.float32))
        there.append(env.state() is not None)
        assert all(len(log) <= 10 for log in env._actions)
    (once,) = recwarn
    assert str(once.message).startswith("an episode of 10 steps or more is not replayed: a run resumed")
    assert there == [True] * 9 + [False] * 4 + [True] * 3

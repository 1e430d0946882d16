import numpy as np
from rlplug import testing

from rlplug_bitflip.env import BitFlip


def build(columns=2, size=5):
    """Make the environment without a run."""
    env = BitFlip(testing.config("env/bitflip", size=size), testing.context(num_envs=columns))
    env.reset(range(columns))
    return env


def wrong(env):
    """Return a bit of every column that differs from the goal, `[B]`."""
    return (env.bits != env.goal).argmax(1)


def test_flipping_what_differs_reaches_the_goal():
    env = build(columns=20)
    far, ends = (env.bits != env.goal).sum(1), np.full(20, -1)
    for step in range(1, 6):
        row = env.step(wrong(env))
        open_ = ends < 0
        assert (row["reward"][open_] == np.where(row["terminated"], 0, -1)[open_]).all()
        ends[open_ & row["terminated"]] = step
    assert ends.tolist() == far.tolist()


def test_who_does_not_arrive_is_truncated_and_begins_anew():
    env = build(columns=1)
    env.goal[:] = 1 - env.bits  # five flips away
    rows = [env.step(np.array([0])) for _ in range(6)]
    assert [row["truncated"].item() for row in rows] == [False] * 4 + [True, False]
    assert [row["reward"].item() for row in rows] == [-1.0] * 5 + [0.0]
    assert not any(row["terminated"].any() for row in rows)


def test_other_goals_are_worth_what_the_environment_says():
    env, bits = build(), np.eye(5, dtype=np.int8)
    assert env.reward(bits, bits[[0, 1, 2, 0, 0]]).tolist() == [0, 0, 0, -1, -1]
    assert env.terminated(bits, bits[[0, 1, 2, 0, 0]]).tolist() == [True, True, True, False, False]


def test_hindsight_continues_exactly():
    from rlplug.testing.checks.resume import check_resumes
    from rlplug.testing.checks.runs import Case

    check_resumes(Case("dqn", "bitflip", ("env.size=4", "buffer=her", "algo.n_step=2")))

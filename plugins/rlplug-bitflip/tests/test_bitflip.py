import numpy as np
from rlplug import testing

from rlplug_bitflip.env import Bitflip


def build(columns=2, **options):
    """The environment alone: no run is needed."""
    return Bitflip(testing.config("env/bitflip", **options), testing.context(num_envs=columns))


def test_always_right_ends_in_the_last_cell():
    env = build(size=3, slip=0.0)
    env.reset(seeds=[1, 2])
    env.cell = np.array([0, 1])
    first, second, third = (env.step(np.array([1, 1])) for _ in range(3))
    assert first["reward"].tolist() == [0.0, 1.0]
    assert first["terminated"].tolist() == [False, True]
    assert second["reward"].tolist() == [1.0, 0.0]  # the second column was reset
    assert second["obs"][1, :2].sum() == 1.0
    assert not second["truncated"].any()
    assert third["reward"][0] == 0.0


def test_who_does_not_arrive_is_truncated():
    env = build(columns=1, slip=0.0, max_episode_steps=3)
    env.reset(seeds=[1])
    ends = [env.step(np.array([0]))["truncated"].item() for _ in range(4)]
    assert ends == [False, False, True, False]

"""Seeds of episodes: those of 32 bits suit NumPy, and ``env.seed_bits=31`` suits what takes signed numbers."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv

from rlplug.cli import main
from rlplug.envs import EnvList, NativeVector
from rlplug.types import RunError
from tests.envs.making import gym


class Short(gymnasium.Env):
    """Episodes of 3 steps that observe a number drawn by their seed."""

    observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(2)
    draw = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps, self.draw = 0, self.drawn(seed)
        return self.draw, {}

    def drawn(self, seed):
        return np.array([np.random.RandomState(seed).rand()], np.float32)  # of 32 bits without a sign

    def step(self, action):
        self.steps += 1
        return self.draw, 0.0, False, self.steps == 3, {}


class Signed(Short):
    """Its generator takes a C int."""

    def drawn(self, seed):
        return super().drawn(np.int32(seed))


class Grumpy(Short):
    """Refuses some seeds, of however many bits."""

    def drawn(self, seed):
        raise ValueError("no such level")


for made in (Short, Signed, Grumpy):
    gymnasium.register(f"{made.__name__}-v0", made)


def episodes(envs, seeds, steps=40):
    """What 10 episodes of every column observe."""
    rows = [envs.reset(seeds)["obs"].copy()]
    return np.stack([*rows, *(envs.step(np.zeros(len(seeds), np.int64))["obs"].copy() for _ in range(steps))])


def test_half_of_all_seeds_have_32_bits_and_the_line_says_what_to_set():
    """The generators of NumPy take them all; a C int takes those of 31 bits."""
    episodes(EnvList([Short(), Short()]), [1, 2])
    said = r"^environment \d \(episode \d, seed \d{10}, step 0\) rejects this seed \(OverflowError: .*\); it accepts"
    with pytest.raises(RunError, match=said + " 31 bits: set env.seed_bits=31$"):
        episodes(EnvList([Signed(), Signed()]), [1, 2])


def test_another_failure_of_a_reset_is_told_as_it_is():
    with pytest.raises(RunError, match=r"(?s)raised in reset\(\):.*ValueError: no such level$"):
        episodes(EnvList([Grumpy()]), [1])


def test_seeds_of_31_bits_are_those_of_32_without_the_last():
    wide, narrow = EnvList([Short(), Short()]), EnvList([Signed(), Signed()], seed_bits=31)
    wide.reset([1, 2])
    found = episodes(narrow, [1, 2])
    assert [narrow._seed(i) for i in range(2)] == [
        int(np.random.SeedSequence([seed, 10]).generate_state(1)[0]) // 2 for seed in (1, 2)
    ]
    assert len(np.unique(found)) == 22  # 11 episodes of each column
    there = gym("tests.envs.test_seeds:Signed-v0", vectorization="subprocess", workers=1, seed_bits=31)
    np.testing.assert_array_equal(episodes(there, [1, 2]), found)


def test_what_is_restored_goes_on_with_the_same_seeds():
    one, other = (EnvList([Signed(), Signed()], seed_bits=31) for _ in range(2))
    episodes(one, [1, 2], steps=17)
    other.load(one.state())
    for _ in range(30):
        rows = [envs.step(np.zeros(2, np.int64))["obs"].copy() for envs in (one, other)]
        np.testing.assert_array_equal(*rows)


def test_columns_of_a_vector_that_are_seeded_one_by_one():
    seeds = [2**32 - 1, 2**31 + 5]
    found = NativeVector(SyncVectorEnv([Signed, Signed]), seed_bits=31).reset(seeds)["obs"]
    expected = [np.random.RandomState(seed // 2).rand() for seed in seeds]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)
    with pytest.raises(RunError, match="OverflowError"):
        NativeVector(SyncVectorEnv([Signed, Signed])).reset(seeds)


def test_a_run_says_what_to_set(tmp_path: Path, capsys):
    assert main(["env=gymnasium", "env.id=Signed-v0", "logger=[]", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("set env.seed_bits=31")
    assert not (tmp_path / "run").exists()

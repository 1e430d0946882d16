"""An environment is one column of one vector: an object that is handed out twice is refused, whatever wraps it."""

from itertools import repeat
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from rlplug.cli import main
from rlplug.envs import EnvList, NativeVector
from rlplug.types import ConfigError
from tests.envs.making import gym

SAID = "one object of Ten was created once and returned twice"


class Ten(gymnasium.Env):
    """Episodes of 10 steps."""

    observation_space, action_space = Box(0, 10, (1,), np.float32), Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 7:
            raise ValueError("tired")
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 10, False, {}


ONE, OTHER = Ten(), Ten()


def bare():
    return ONE


def wrapped():
    return TimeLimit(OTHER, 50)


gymnasium.register("Bare-v0", bare)
gymnasium.register("Wrapped-v0", wrapped)


@pytest.mark.parametrize("num_envs", [1, 4])  # evaluation's environment, or the next column, is the same
@pytest.mark.parametrize("name", ["Bare-v0", "Wrapped-v0"])
def test_a_factory_that_returns_one_object_is_refused_before_the_run(name, num_envs, tmp_path: Path, capsys):
    words = ["env=gymnasium", f"env.id={name}", f"num_envs={num_envs}", "rollout_fragment_length=256"]
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlplug: env: {SAID}")
    assert not (tmp_path / "run").exists()


def test_columns_of_lists():
    for wrap in (lambda env: env, lambda env: TimeLimit(env, 50)):
        env = Ten()
        with pytest.raises(ConfigError, match=SAID):
            EnvList([wrap(env), wrap(env)])
        with pytest.raises(ConfigError, match=SAID):
            EnvList([wrap(env)])  # in another list
    for _ in range(3):
        EnvList([Ten(), TimeLimit(Ten(), 50)]).close()


def test_columns_of_a_vector():
    env = Ten()
    with pytest.raises(ConfigError, match=SAID):
        NativeVector(SyncVectorEnv([lambda: env] * 2))
    vector = SyncVectorEnv([Ten, Ten])
    NativeVector(vector)
    with pytest.raises(ConfigError, match="one object of SyncVectorEnv was created once"):
        NativeVector(vector)


def test_columns_of_a_process():
    with pytest.raises(ConfigError, match=SAID):
        gym("tests.envs.test_one_object:Bare-v0", vectorization="subprocess", workers=1)


def test_what_stands_in_for_an_environment_that_failed():
    env = Ten()
    envs = EnvList([env], remake=repeat(env).__next__)
    envs.reset([1])
    with pytest.raises(ConfigError, match=SAID):
        [envs.step(np.zeros(1, np.int64)) for _ in range(7)]

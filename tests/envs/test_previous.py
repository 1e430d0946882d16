"""Previous actions and rewards as inputs of a policy."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Graph, MultiDiscrete

import rlplug
from rlplug.envs import PreviousInputs
from rlplug.types import ConfigError


class Arms(gymnasium.Env[Any, Any]):
    """One of two arms pays 1 for ten steps; the observation does not say which."""

    observation_space, action_space = Box(-1.0, 1.0, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.good, self.t = int(self.np_random.integers(2)), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(1, np.float32), float(action == self.good), self.t == 10, False, {}


def test_rows_have_what_was_done_and_paid_before():
    env = PreviousInputs(Arms())
    obs, _ = env.reset(seed=1)
    assert obs in env.observation_space
    assert obs["prev_action"].tolist() == [0.0, 0.0]
    assert obs["prev_reward"].tolist() == [0.0]
    for action in (1, 0):
        obs, reward, *_ = env.step(action)
        assert obs in env.observation_space
        assert obs["prev_action"].tolist() == [float(action == 0), float(action == 1)]
        assert obs["prev_reward"].tolist() == [reward]
    obs, _ = env.reset()
    assert not obs["prev_action"].any()


@pytest.mark.parametrize(("space", "size"), [(Box(1.0, 2.0, (3,)), 3), (MultiDiscrete([2, 3]), 5)])
def test_zeros_of_the_first_row_are_in_the_space_of_every_action(space, size):
    arms = Arms()
    arms.action_space = space
    env = PreviousInputs(arms)
    obs, _ = env.reset()
    assert obs in env.observation_space
    assert obs["prev_action"].shape == (size,)


def test_an_action_that_is_no_vector_is_refused():
    arms = Arms()
    arms.action_space = Graph(Discrete(2), None)
    with pytest.raises(ConfigError, match=r"env.wrappers: .*cannot flatten the action space Graph"):
        PreviousInputs(arms)


def test_a_memory_of_rewards_finds_the_arm_that_pays(tmp_path):
    words = ["algo=ppo", "model=gru", "model.hidden=32", "model.torso.hidden=[32]", "hardware=cpu", "compile=off"]
    words += ["total_steps=16_000", "num_envs=16", "rollout_fragment_length=40", "algo.sgd_minibatch_size=320"]
    words += ["algo.num_sgd_iter=4", "algo.lr=5e-3", "seed=1", "logger.only=[]", "eval.every=0", "eval.episodes=50"]
    words += ["env.wrappers=[rlplug.envs:PreviousInputs]", f"hydra.run.dir={tmp_path / 'run'}"]
    result = rlplug.train(words, env=Arms)
    assert float(result) > 8.5  # 5 without a memory, 9.5 at best

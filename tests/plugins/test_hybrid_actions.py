"""Hybrid action spaces: what learns from them, and what refuses them."""

import re

import numpy as np
import pytest
import torch

import rlplug
from rlplug.config import compose
from rlplug.data.recording import Recording
from rlplug.data.rows import check_stream
from rlplug.data.source import Reading
from rlplug.envs.rows import actions_misfit
from rlplug.run.build import build
from rlplug.testing.checks.ranks import check_ranks
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from rlplug.types import ConfigError, EnvSpec, Group
from tests.nn.test_heads import HYBRID
from tests.plugins.aiming import BEST, ONE_PART, Aiming

ENV = ["env=gymnasium", "env.id=null", "env.entry_point=tests.plugins.aiming:Aiming"]
RUN = ["hardware=cpu", "logger.only=[]", "seed=1", "tuned=none", "model.hidden=[32]", "eval.every=0"]
PPO = ["algo=ppo", "algo.lr=0.003", "algo.gamma=0", "num_envs=8", "rollout_fragment_length=64"]
PPO += ["algo.sgd_minibatch_size=64", "algo.num_sgd_iter=6", "total_steps=4096"]
SMALL = ["algo=ppo", "num_envs=2", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "total_steps=64"]


@pytest.mark.parametrize("masked", ["false", "true"])
def test_it_learns_both_parts(masked, tmp_path):
    """A policy that has learned one part only returns 4 at most."""
    words = [*PPO, *ENV, *RUN, f"+env.kwargs.mask={masked}", "eval.episodes=20"]
    result = rlplug.train(words, folder=tmp_path / "run")
    assert 1.5 * ONE_PART < float(result) <= BEST
    agent, obs = rlplug.load(tmp_path / "run"), np.array([0.5, 0.0, 1.0, 0.0], np.float32)
    given = {"action_mask": [False, True, True]} if masked == "true" else {}
    action = agent.act(obs, **given)
    assert Aiming().action_space.contains(action)
    assert action["which"] == 2
    assert action["where"] == pytest.approx(7.5, abs=2.0)


def test_recorded_actions_are_those_that_were_played(tmp_path):
    """Scored again by the environment's rule, they give the recorded rewards."""
    rlplug.train([*SMALL, *ENV, *RUN, f"record.path={tmp_path / 'data'}"], folder=tmp_path / "run")
    recording = Recording([str(tmp_path / "data")], Reading())
    for number in range(len(recording.lengths)):
        rows = recording.episode(number, ["obs", "action", "reward", "valid"], 1)
        obs, action, reward = (
            rows[key][rows["valid"]].reshape(recording.lengths[number], -1) for key in list(rows)[:3]
        )
        at = np.clip(action[:, 0], -1, 1)
        expected = np.where(obs[:, 1:].argmax(1) == action[:, 1], 1 - np.abs(at - obs[:, 0]), 0)
        np.testing.assert_allclose(reward[:, 0], expected, atol=1e-5)


CASE = (*ENV[1:], *RUN, "rollout_fragment_length=16", "algo.sgd_minibatch_size=32")


def test_a_run_resumes_bit_for_bit():
    check_resumes(Case("ppo", "gymnasium", (*CASE, "exploration=[icm]")), updates=2)


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_an_update_on_two_ranks_equals_one(algo):
    words = CASE if algo == "ppo" else CASE[:-1]
    check_ranks(Case(algo, "gymnasium", words))


@pytest.mark.parametrize(
    ("algo", "why"),
    [
        ("dqn", "dqn needs one Discrete action, but .*; use algo=ppo"),
        ("sac", "sac serves Box, Discrete, .*; use algo=ppo"),
        ("ddpg", "needs continuous actions within bounds, .*; use algo=ppo"),
        ("dreamerv3", "dreamerv3 serves .*; use algo=ppo"),
        ("es", "es cannot choose actions of Hybrid.*; use algo=ppo for these"),
    ],
)
def test_values_of_one_kind_are_refused(algo, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        build(compose([f"algo={algo}", *ENV, "hardware=cpu", "logger.only=[]"]), tmp_path)


def test_values_of_recorded_actions_are_refused(tmp_path):
    rlplug.train([*SMALL, *ENV, *RUN, f"record.path={tmp_path / 'data'}"], folder=tmp_path / "run")
    words = ["algo=iql", *ENV, "hardware=cpu", "logger.only=[]", f"data.path={tmp_path / 'data'}"]
    with pytest.raises(ConfigError, match=r"either continuous or discrete actions.* use algo=ppo, or .* algo=marwil"):
        build(compose(words), tmp_path)


def test_order_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"algo\.distribution: autoregressive conditions several choices"):
        build(compose([*SMALL, *ENV, *RUN, "algo.distribution=autoregressive"]), tmp_path)


@pytest.mark.parametrize(
    ("which", "why"), [(1.0, None), (3.0, "its actions do not match"), (0.5, "its actions do not match")]
)
def test_recorded_choices_that_do_not_exist_are_refused(which, why):
    spec = EnvSpec({"agent": Group(HYBRID.continuous, HYBRID)})
    flags = {key: np.array(values) for key, values in (("valid", [True, False]), ("is_first", [True, False]))}
    flags |= {"terminated": flags["valid"], "truncated": ~flags["valid"] & False}
    action = np.array([[0.5, 1.5, which, 1.0], [0.0] * 4], np.float32)
    rows = flags | {"obs": np.zeros((2, 2), np.float32), "action": action, "reward": np.zeros(2, np.float32)}
    if why is None:
        check_stream(rows, np.array([1]), spec)
        return
    with pytest.raises(ValueError, match=why):
        check_stream(rows, np.array([1]), spec)


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ([0.5, 1.5, 2.0, 1.0], None),
        ([0.5, 1.5, 3.0, 1.0], r"returned the action 3.0, which is not in Hybrid\("),
        ([0.5, 1.5, 0.5, 1.0], "returned the action 0.5, which"),
        ([0, 1, 2, 1], "returned actions of int64 for Hybrid.*; return float32"),
    ],
)
def test_an_algorithm_that_returns_others_is_told(action, why):
    spec = EnvSpec({"agent": Group(HYBRID.continuous, HYBRID)})
    found = actions_misfit(spec, {"action": torch.tensor([action])}, 1)
    assert found is None if why is None else re.search(why, found)

"""Runs whose state is more than that of the matrix's cells resume to the last bit: rollouts that are played ahead,
weights that are older than the learner's, segments that are kept, priorities in parts, goals in hindsight."""

from __future__ import annotations

import pytest

from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from tests.plugins.test_bandits import recorded
from tests.plugins.test_her import GOALS as LINE

SEGMENTS = ("rollout_fragment_length=8", "train_batch_size=64", "tuned=none")
GRADIENTS = ("num_envs=4", "rollout_fragment_length=8", "train_batch_size=16", "algo.lr=0.01", "tuned=none")
LSTM = ("model=lstm", "model.hidden=8")
APEX = (
    *("tuned=none", "model.hidden=[16]", "rollout_fragment_length=8", "train_batch_size=16", "num_envs=4"),
    *("replay_ratio=0.0625", "num_steps_sampled_before_learning_starts=64", "buffer.capacity=400"),
    *("loop.in_flight=3", "buffer.num_shards=2"),
)
GOALS = (LINE[-1], "env.max_episode_steps=7", "buffer=her", "num_envs=2", "model.hidden=[8]")
ROLLOUT = ("tuned=none", "model.hidden=[8]", "rollout_fragment_length=16", "algo.sgd_minibatch_size=64")
SMALL = (
    *("tuned=none", "model.hidden=[8]", "train_batch_size=8", "buffer.capacity=400"),
    *("num_envs=2", "num_steps_sampled_before_learning_starts=32"),
)
MOMENTUM = ("algo.opt_type=rmsprop", "algo.momentum=0.5")
TEAM = (
    *("tuned=none", "num_envs=4", "rollout_fragment_length=8", "train_batch_size=8", "replay_ratio=0.0625"),
    *("num_steps_sampled_before_learning_starts=64", "buffer.capacity=400"),
)
SPREAD = ("env.max_episode_steps=7", *TEAM)
GRU = ("model.hidden=8", "model.torso.hidden=[8]")
CASES = {
    "gradients of rollouts ahead, with a memory": ("a3c", "cartpole", (*GRADIENTS, "loop.in_flight=4", *LSTM)),
    "gradients of old weights": ("a3c", "cartpole", (*GRADIENTS, "model.hidden=[8]", "loop.broadcast_interval=3")),
    "apex dqn": ("apex_dqn", "cartpole", (*APEX, "algo.hiddens=[16]")),
    "apex ddpg": ("apex_ddpg", "pendulum", APEX),
    "a ring, and a target": ("appo", "cartpole", (*SEGMENTS, "algo.target_update_period=3", "algo.kl_coeff=0.2")),
    "a queue, and momentum": ("appo", "cartpole", (*SEGMENTS, "buffer=queue", *MOMENTUM)),
    "rollouts ahead": ("impala", "cartpole", (*SEGMENTS, "loop.in_flight=4", *LSTM)),
    "old weights, and momentum": ("impala", "cartpole", (*SEGMENTS, "loop.broadcast_interval=3", *MOMENTUM)),
    "a delay": ("impala", "cartpole", (*SEGMENTS, "loop.max_weight_sync_delay=100", "loop.in_flight=3")),
    "segments that wait": (
        *("impala", "cartpole"),
        (*SEGMENTS, "num_steps_sampled_before_learning_starts=256", "replay_ratio=0.015625"),
    ),
    "segments that are replayed": (
        *("impala", "cartpole"),
        (*SEGMENTS, "buffer.replay_proportion=1.5", "buffer.replay_capacity=3"),
    ),
    "adamw": ("ppo", "pendulum", (*ROLLOUT, "optimizer=adamw", "algo.lr=[[0, 1e-3], [1000, 0]]")),
    "rmsprop": ("ppo", "pendulum", (*ROLLOUT, "optimizer=rmsprop", "+optimizer_options.momentum=0.5")),
    "sgd": ("ppo", "pendulum", (*ROLLOUT, "optimizer=sgd", "optimizer_options={momentum: 0.9, nesterov: true}")),
    "beta": ("sac", "pendulum", (*SMALL, "algo.distribution=beta")),
    "muon": ("sac", "pendulum", (*SMALL, "optimizer=muon", "+optimizer_options.weight_decay=0.1")),
    "whole episodes of a team": ("qmix", "spread_torch", (*SPREAD, *GRU)),
    "a team's sequences": (
        *("qmix", "spread_torch"),
        (*SPREAD, *GRU, "algo.batch_mode=windows", "buffer=sequence", "algo.mixer=none", "algo.sequence_length=4"),
    ),
    "apex qmix": ("apex_qmix", "spread_torch", (*APEX, "env.max_episode_steps=7")),
    "two groups": ("maddpg", "chase", (*TEAM, "model.hidden=[8]", "algo.infer_policies=true")),
    "goals": ("dqn", "gymnasium", (*GOALS, "algo.n_step=3")),
    "goals of a point": ("td3", "gymnasium", (*GOALS, "+env.kwargs.continuous=true", "algo.n_step=2")),
}


@pytest.mark.parametrize("name", CASES)
def test_it_resumes_bit_for_bit(name):
    check_resumes(Case(*CASES[name]), updates=5)


def test_a_run_on_a_record_resumes(tmp_path):
    recorded(path := tmp_path / "log.npz", 900, propensity=None)
    check_resumes(Case("lints", "logged_bandit", (f"env.path={path}", "total_steps=800", "env.max_episode_steps=3")))

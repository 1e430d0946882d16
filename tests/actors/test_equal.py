"""Actors change how fast, never what: a run with two actors equals a run in one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug.config import compose
from rlplug.run.build import build, start
from rlplug.testing.checks.ranks import distances
from rlplug.testing.checks.runs import flat
from tests.actors.conftest import TWO, play

SAC = (
    *("algo=sac", "env=pendulum", "num_envs=2", "model.hidden=[16]", "train_batch_size=16", "logger.only=[]"),
    "num_steps_sampled_before_learning_starts=20",
)
LISTS = ("env=cartpole", "env.vectorization=list", "num_envs=4", "logger.only=[]", "rollout_fragment_length=16")
PPO = (*LISTS, "algo=ppo", "algo.sgd_minibatch_size=16", "algo.num_sgd_iter=2")
NORMAL = ("preprocess.normalize_obs=true", "preprocess.normalize_reward=true")
SLOW = ("dqn", "parameter", "device", "alphazero", "slateq")
PLANS = ("num_envs=4", "logger.only=[]", "model.hidden=[16]", "train_batch_size=4", "replay_ratio=0.03125")
CASES = {
    "alphazero, ranked rewards, reused trees": (
        (
            *(*PLANS, "algo=alphazero", "env=knapsack", "algo.num_simulations=6", "algo.ranked_rewards=true"),
            *("algo.reuse_tree=true", "algo.num_returns=20"),
        ),
        4,
    ),
    "slateq": ((*PLANS, "algo=slateq", "env=interest_evolution", "num_steps_sampled_before_learning_starts=32"), 4),
    "sac, correlated noise, running moments, n-step": (
        (*SAC, *NORMAL, "exploration=[ornstein_uhlenbeck]", "algo.n_step=3"),
        12,
    ),
    "sac, parameter noise": ((*SAC, "exploration=[parameter_noise]"), 12),
    "ppo, recurrent, curiosity": ((*PPO, "model=lstm", "model.hidden=8", "algo.max_seq_len=8", "exploration=[icm]"), 3),
    "ppo, hybrid actions": (
        (
            *("env=gymnasium", "env.id=null", "env.entry_point=tests.plugins.aiming:Aiming", *PPO[1:]),
            *("env.vectorization=list", "tuned=none", "model.hidden=[16]"),
        ),
        3,
    ),
    "ppo, environments on a device": (("env=cartpole_torch", *PPO[2:]), 3),
    "dqn, falling epsilon, priorities, noisy": (
        (
            *(*LISTS, "algo=dqn", "model.hidden=[16]", "buffer=prioritized", "algo.noisy=true"),
            *("exploration.epsilon_greedy.epsilon=[[0,1.0],[200,0.1]]", "train_batch_size=16"),
            "num_steps_sampled_before_learning_starts=64",
        ),
        12,
    ),
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("words", "updates"),
    [
        pytest.param(*case, marks=pytest.mark.slow if any(word in name for word in SLOW) else ())
        for name, case in CASES.items()
    ],
    ids=CASES.keys(),
)
def test_two_actors_equal_one_process(words: tuple[str, ...], updates: int):
    assert distances(play(words, updates), play((*words, *TWO), updates)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_older_weights_are_the_loops_and_not_the_hardwares():
    """Rounds that are ordered ahead, with weights that are kept for three rounds: the same in one process."""
    words = (*SAC, *NORMAL, "rollout_fragment_length=5", "loop.in_flight=2", "loop.broadcast_interval=3")
    alone = play(words, 40)
    assert distances(alone, play((*words, *TWO), 40)) == []
    newest, name = play((*SAC, *NORMAL, "rollout_fragment_length=5"), 40), "weights.model.net.layers.0.weight"
    assert not torch.allclose(alone[name], newest[name], atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_aggregation_and_subprocesses():
    """Aggregators concatenate segments before the learner fetches them; environments run in subprocesses of actors."""
    more = ("hardware.actors.count=4", "hardware.actors.num_aggregation_workers=2", "env.vectorization=subprocess")
    words = (*PPO, "model.hidden=[16]")
    assert distances(play(words, 3), play((*words, *TWO, *more), 3)) == []


@pytest.mark.usefixtures("cluster")
def test_gradients_of_two_actors_are_those_of_one_process():
    """Two of half of the environments each, with what rewards are divided by, which the learner tells the actors."""
    words = (*LISTS, *NORMAL, "algo=a3c", "model.hidden=[16]", "train_batch_size=64")
    words = (*words, "loop.in_flight=1", "loop.shards=2")
    found = []
    for more in ((), TWO):
        with closing(build(compose([*words, *more]), Path())) as trainer:
            start(trainer)
            for _ in range(4):
                trainer.policy.normalizer.commit()  # as run.report() does
                trainer.collect("explore")
                while trainer.ready():
                    trainer.update()
            found.append(flat(trainer.algorithm.state_dict()))
            assert trainer.progress.updates == 4
    assert distances(*found) == []

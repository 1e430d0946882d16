"""Hardware changes how fast, never what: several ranks equal one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug.api import Plan
from rlplug.config import compose, parse
from rlplug.distributed.fabric import one_rank
from rlplug.run.build import build
from rlplug.testing.checks.ranks import distances
from rlplug.testing.checks.runs import flat
from rlplug.testing.rank_pool import ranks

SAC = (
    *("algo=sac", "env=pendulum", "model.hidden=[32]", "total_steps=10_000", "train_batch_size=64", "logger=[]"),
    "num_steps_sampled_before_learning_starts=80",
)
PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "model.hidden=[32]", "rollout_fragment_length=32"),
    *("algo.num_sgd_iter=2", "algo.sgd_minibatch_size=16", "algo.max_seq_len=8"),
)
RND = ("exploration=[rnd]", "exploration.rnd.update_proportion=0.5")


def shared(module):
    """Return the state that does not depend on the environments of a rank."""
    return {name: x for name, x in module.state_dict().items() if name not in ("returns", "seed", "rounds")}


def play(fabric, raw, updates):
    """Return weights and statistics of a run on this rank after ``updates`` updates."""
    config = parse(raw)
    with closing(build(config, Path(), fabric, Plan("cpu", fabric.world_size))) as trainer:
        loop, progress = trainer.loop, trainer.progress
        while progress.updates < updates:
            warm = progress.env_steps >= loop.learning_starts
            trainer.collect("explore" if warm else "random")
            due = progress.updates + 1 if loop.replay_ratio is None else loop.updates(progress.env_steps)
            while trainer.ready() and progress.updates < due:
                trainer.update()
        return flat(
            {
                "weights": trainer.algorithm.state_dict(),
                "preprocess": shared(trainer.policy.normalizer),
                "exploration": {name: shared(extra) for name, extra in trainer.policy.exploration.items()},
                "steps": torch.tensor(float(trainer.progress.env_steps)),
            }
        )


@pytest.mark.parametrize(
    ("words", "updates", "n"),
    [
        (SAC, 20, 2),
        pytest.param(SAC, 20, 4, marks=pytest.mark.slow),
        ((*SAC, "buffer=prioritized"), 20, 2),
        ((*SAC, "algo.n_step=3", "exploration=[gaussian]", "preprocess.normalize_obs=true"), 20, 2),
        ((*SAC, "exploration=[parameter_noise]"), 20, 2),
        ((*PPO, "num_envs=3", "preprocess.normalize_reward=true", "exploration=[icm]"), 2, 2),
        ((*PPO, "num_envs=3", *RND), 2, 2),
        ((*PPO, "num_envs=3", *RND, "exploration.rnd.sgd_minibatch_size=2"), 2, 2),
        pytest.param((*PPO, "num_envs=1", "model=lstm", "model.hidden=8"), 2, 4, marks=pytest.mark.slow),
    ],
    ids=["sac", "sac-4", "prioritized", "n-step", "parameter-noise", "icm", "ppo-rnd", "rnd-minibatches", "lstm-4"],
)
def test_one_environment_feeds_all_ranks(words: tuple[str, ...], updates: int, n: int):
    """Where environments do not divide by the ranks, the first rank collects for all."""
    raw = compose(words).raw
    alone = play(one_rank(), raw, updates)
    for answer in ranks(n)(play, raw, updates):
        assert distances(alone, answer) == []


@pytest.mark.parametrize(
    "words",
    [(*PPO, "num_envs=4"), (*PPO, "num_envs=4", "preprocess.normalize_obs=true", "preprocess.normalize_reward=true")],
    ids=["ppo", "ppo-normalised"],
)
def test_each_rank_has_its_share_of_environments(words: tuple[str, ...]):
    """An on-policy update does not depend on which rank played which environment."""
    raw = compose(words).raw
    alone = play(one_rank(), raw, 2)
    for answer in ranks(2)(play, raw, 2):
        assert distances(alone, answer) == []

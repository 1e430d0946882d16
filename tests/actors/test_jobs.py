"""Actors play jobs as one process would, whoever of them is free, and whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplug.actors.collector import owned
from rlplug.api import Job
from rlplug.config import compose
from rlplug.run.build import build, start
from rlplug.testing.checks.runs import flat
from rlplug.types import ConfigError
from tests.actors.conftest import TWO, processes
from tests.collection.test_play import NO_TASKS

PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=2", "model.hidden=[8]", "logger.only=[]"),
    *("rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "algo.num_sgd_iter=1"),
    "preprocess.normalize_obs=true",
)
SAC = (
    *("algo=sac", "env=pendulum", "num_envs=2", "model.hidden=[8]", "train_batch_size=16", "logger.only=[]"),
    *("exploration=[parameter_noise]", "num_steps_sampled_before_learning_starts=4", "rollout_fragment_length=4"),
)
JOBS = [Job(k, episodes=1 + k % 3, max_steps=60, mode=mode) for k, mode in enumerate(("explore", "greedy") * 4)]


def test_tensors_share_no_memory_with_arrays_of_ray():
    arrays = {"obs": {"pos": np.zeros(3, np.float32)}, "reward": np.ones(2, np.float32)}
    batch = owned(arrays)
    batch["obs"]["pos"] += 1.0
    batch["reward"].zero_()
    assert arrays["obs"]["pos"].tolist() == [0.0, 0.0, 0.0]
    assert arrays["reward"].tolist() == [1.0, 1.0]


def played(words: Sequence[str], kill: bool = False) -> dict[str, Any]:
    """Return the episodes of jobs between two rounds of training, and what the run has then."""
    trainer: Any = build(compose([*words]), Path())
    with closing(trainer):
        start(trainer)
        trainer.collect()
        trainer.update()
        own = {
            key: 0.9 * x for key, x in trainer.algorithm.state_dict().items() if key in trainer.algorithm.actor_keys()
        }
        jobs = [*JOBS, Job(9, {"": "own"}, episodes=2, max_steps=60)]
        if kill:
            processes()[0].kill()
        ended = {job.number: batch for job, batch in trainer.play(jobs, {"own": own})}
        batches = [ended[job.number] for job in jobs]
        with pytest.raises(ValueError, match=r"^job 4 plays with the weights 'up'; available: none$"):
            list(trainer.play([Job(4, {"": "up"})]))
        with pytest.raises(ConfigError, match=NO_TASKS):
            list(trainer.play([Job(3, task=1.0)]))
        trainer.collect()
        trainer.update()
        state = {"weights": trainer.algorithm.state_dict(), "progress": vars(trainer.progress)}
        state |= {
            "normalizer": trainer.policy.normalizer.state_dict(),
            "episodes": trainer.episodes.state()["finished"],
        }
        return flat({"jobs": dict(zip(map(str, range(9)), batches, strict=True))} | state)


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return what is not the same in both, to rounding: two rows may be multiplied otherwise than one."""
    both = a.keys() & b.keys()
    x, y = ({key: torch.as_tensor(value).double() for key, value in one.items()} for one in (a, b))
    other = [key for key in both if x[key].shape != y[key].shape or not torch.allclose(x[key], y[key], atol=1e-6)]
    return [*other, *(a.keys() ^ b.keys())]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("words", [PPO, SAC], ids=["ppo", "sac, parameter noise"])
def test_two_actors_play_jobs_as_one_process(words):
    alone = played(words)
    assert unequal(alone, played((*words, *TWO))) == []
    assert {"jobs.0.reward", "jobs.8.reward", "progress.env_steps"} <= alone.keys()


@pytest.mark.usefixtures("cluster")
def test_a_job_whose_actor_is_killed_is_played_again(capfd: pytest.CaptureFixture[str]):
    assert unequal(played(PPO), played((*PPO, *TWO), kill=True)) == []
    assert "its process died" in capfd.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_jobs_of_a_killed_actor_do_not_wait_for_its_restart():
    words = (*PPO, *TWO, "hardware.actors.backoff_s=20")
    with closing(build(compose([*words]), Path())) as trainer:
        start(trainer)
        processes()[0].kill()
        assert {job.number for job, _ in trainer.play(JOBS)} == {job.number for job in JOBS}
        assert len(processes()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_actors_that_are_left_play_all_jobs():
    alone, left = played(PPO), played((*PPO, *TWO, "hardware.actors.on_failure=ignore"), kill=True)
    assert not [key for key in unequal(alone, left) if key.startswith("jobs.")]
    assert unequal(alone, left)  # the columns of the actor that is lost were collected no more

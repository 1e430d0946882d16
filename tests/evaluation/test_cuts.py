"""Episodes of an evaluation are cut after ``eval.max_episode_steps``, and a line says so."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlplug.api import Job
from rlplug.cli import main
from rlplug.config import compose, parse
from rlplug.envs.seeded import tell_once
from rlplug.evaluation.evaluator import shares_of
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.rank_pool import ranks


class Endless(gymnasium.Env):
    """Pays 1 at every step, and never ends."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def endless(**kwargs):
    return Endless()


gymnasium.register("NeverEnds-v0", endless)
WORDS = ["env=gymnasium", "env.id=tests.evaluation.test_cuts:NeverEnds-v0", "total_steps=256", "num_envs=1",
         "rollout_fragment_length=256", "model.hidden=[4]", "algo.num_sgd_iter=1", "logger.only=[]", "hardware=cpu",
         "eval.episodes=2"]  # fmt: skip
SAID = "rlplug: eval.max_episode_steps=40 truncates episodes of an evaluation; "


@pytest.fixture(autouse=True)
def untold():
    tell_once.cache_clear()


def test_a_run_cuts_and_says_so_once(tmp_path: Path, capfd):
    assert train(compose([*WORDS, "eval.every=128", "eval.max_episode_steps=40"]), tmp_path / "run") == 40.0
    assert capfd.readouterr().err.count(SAID) == 1


def test_the_default_is_half_an_hour_of_atari_and_a_job_may_have_less(tmp_path: Path):
    assert compose(WORDS).eval.max_episode_steps == 27_000
    trainer = build(compose(WORDS), tmp_path)
    for most in (30, 50):
        shorter = trainer.reports.evaluation.evaluator.play(Job(0, max_steps=most, mode="greedy"), 0)
        assert shorter["length"].tolist() == [most]
    trainer.close()


@pytest.mark.slow
def test_more_may_be_asked_for(tmp_path: Path):
    trainer = build(compose([*WORDS, "eval.max_episode_steps=27_010", "eval.episodes=1"]), tmp_path)
    evaluator = trainer.reports.evaluation.evaluator
    played = evaluator.play(evaluator.job, 0)
    assert (played["return"].tolist(), played["length"].tolist()) == ([27_010.0], [27_010])
    trainer.close()


def test_an_evaluation_of_a_checkpoint_cuts_elsewhere(tmp_path: Path, capfd):
    train(compose([*WORDS, "eval.every=0", "eval.max_episode_steps=30"]), tmp_path / "run")
    for mode in ("--explore", None):
        tell_once.cache_clear()
        capfd.readouterr()
        words = ["evaluate", str(tmp_path / "run"), "--json", "eval.max_episode_steps=40"]
        assert main([*words, *([mode] if mode else [])]) == 0
        told = capfd.readouterr()
        assert json.loads(told.out)["eval/length_mean"] == 40.0
        assert SAID in told.err


def test_nothing_is_said_where_the_environment_ends_its_episodes_then(tmp_path: Path, capfd):
    words = [*WORDS, "env.max_episode_steps=40", "eval.max_episode_steps=40"]
    assert train(compose(words), tmp_path / "run") == 40.0
    assert "cuts" not in capfd.readouterr().err


@pytest.mark.slow
def test_actors_that_evaluate_cut_too(tmp_path: Path, capfd):
    words = [*WORDS, "eval.every=128", "eval.max_episode_steps=40", "hardware=ray"]
    words += ["hardware.actors.count=1", "hardware.actors.evaluation=1", "hardware.actors.num_cpus=0.5"]
    train(compose([word for word in words if word != "hardware=cpu"]), tmp_path / "run")
    assert capfd.readouterr().err.count(SAID) == 1


def evaluated(fabric, raw):
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        evaluation = trainer.reports.evaluation
        _, played = evaluation.evaluator.evaluate(partial(evaluation._play, trainer))
        return sorted(
            zip(played["return"].tolist(), played["length"].tolist(), strict=True)
        )  # they end in another order


@pytest.mark.parametrize("vectorization", ["list", "native"])  # columns that are independent, and columns that are not
def test_two_ranks_play_the_episodes_of_one(vectorization):
    words = ["algo=ppo", "env=cartpole", f"env.vectorization={vectorization}", "model.hidden=[8]", "eval.episodes=5"]
    alone = evaluated(None, compose([*words, "hardware=cpu"]).raw)
    assert len(alone) == 5
    assert ranks(2)(evaluated, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]


def test_every_column_belongs_to_one_share():
    assert shares_of(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert shares_of(100, 2) == [range(16), range(16, 32)]
    assert shares_of(1, 2) == [range(1), range(0)]

"""REINFORCE on whole episodes: each is learned from once, with exactly the return that the environment gave."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug import hookimpl
from rlplug.collection.episodes import EpisodeStats
from rlplug.config import compose, parse
from rlplug.run.build import build
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case, play
from rlplug.testing.rank_pool import ranks
from tests.contract.tenants.learners import FILES
from tests.installing import install, site  # noqa: F401  fixtures

RUN = ["algo=montecarlo", "env=cartpole", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=20"]


@pytest.fixture(autouse=True)
def learners(install):  # noqa: F811
    install("rlplug-learners", "rlplug_learners", FILES)


class Watch:
    """What the environments gave, episode by episode, and what the learner was given."""

    def __init__(self, trainer):
        self.counted, self.played, self.learned = EpisodeStats(trainer.config.num_envs), [], []
        prepare = trainer.algorithm.prepare

        def prepared(batch):
            out = prepare(batch)
            assert batch["is_first"][0].all()
            assert torch.equal(batch["valid"].sum(0), batch["valid"].long().cumprod(0).sum(0))
            ended = (batch["terminated"] | batch["truncated"]) & batch["valid"]
            assert (ended.sum(0) == 1).all(), "whole"
            self.learned += list(zip(out["returns"][0].tolist(), batch["valid"].sum(0).tolist(), strict=True))
            return out

        trainer.algorithm.prepare = prepared
        trainer.hooks.register(self)

    @hookimpl
    def rlplug_collected(self, run, segment):
        self.counted.add(segment.batch, segment.columns)
        self.played += [(returns, length) for returns, length, _ in self.counted.drain()]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_each_episode_once_with_its_exact_return(gamma):
    trainer = build(compose([*RUN, f"algo.gamma={gamma}", "total_steps=6400"]), Path())
    watch = Watch(trainer)
    trainer.loop.run(trainer)
    trainer.close()
    played = [sum(gamma**t for t in range(length)) for _, length in watch.played]  # a reward of 1 at every step
    assert [length for _, length in watch.learned] != []
    learned = sorted(watch.learned, key=lambda pair: pair[1])
    assert len(played) - len(learned) < 8 + 4, "but for the last ones, of which there were too few"
    left = [length for _, length in watch.played]
    for returns, length in learned:
        left.remove(length)
        assert returns == pytest.approx(sum(gamma**t for t in range(length)), rel=1e-5)
    assert all(returns == length for returns, length in watch.played)
    print(f"whole episodes: {len(learned)} of {len(played)} learned from once, returns exact (gamma {gamma})")


def test_it_resumes_bit_for_bit_within_episodes():
    case = Case("montecarlo", "cartpole")
    trainer = case.build()
    play(trainer, 3)
    assert trainer.buffer._open_rows.min() > 0, "episodes are open when the checkpoint is written"
    trainer.close()
    check_resumes(case, updates=3)


def to_its_end(fabric, raw):
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        trainer.loop.run(trainer)
        return trainer.progress.updates


def test_two_ranks_agree_on_when_there_are_episodes_enough():
    words = [word if word != "hardware=cpu" else "hardware=2cpu" for word in RUN]
    first, second = ranks(2)(to_its_end, compose([*words, "total_steps=3200"]).raw)
    assert first == second > 3

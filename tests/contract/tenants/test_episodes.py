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
from rlplug.testing.rank_pool import ranks
from tests.contract.tenants.learners import FILES
from tests.installing import installed

RUN = ["algo=montecarlo", "env=cartpole", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=20"]


learners = installed("rlplug-learners", "rlplug_learners", FILES)


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


def test_each_episode_once_with_its_exact_return():
    gamma = 0.5
    trainer = build(compose([*RUN, f"algo.gamma={gamma}", "total_steps=2400"]), Path())
    watch = Watch(trainer)
    trainer.loop.run(trainer)
    trainer.close()
    learned = sorted(watch.learned, key=lambda pair: pair[1])
    assert len(learned) > 24
    assert len(watch.played) - len(learned) < 8 + 4, "but for the last ones, of which there were too few"
    left = [length for _, length in watch.played]
    for returns, length in learned:
        left.remove(length)
        assert returns == pytest.approx(sum(gamma**t for t in range(length)), rel=1e-5)  # a reward of 1 at every step
    assert all(returns == length for returns, length in watch.played)


def to_its_end(fabric, raw):
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        trainer.loop.run(trainer)
        return trainer.progress.updates


def test_two_ranks_agree_on_when_there_are_episodes_enough():
    words = [word if word != "hardware=cpu" else "hardware=2cpu" for word in RUN]
    first, second = ranks(2)(to_its_end, compose([*words, "total_steps=3200"]).raw)
    assert first == second > 3

"""``loop=async`` in one process: how old segments are, what bounds it, and what cannot be driven by it.

With actors: tests/contract/tenants/test_asynchronous.py.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlplug.api import Needs
from rlplug.config import compose
from rlplug.plugins.algo.impala import IMPALA
from rlplug.plugins.loop.tempo import updates_of
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.checks.runs import Case, play
from rlplug.types import ConfigError
from tests.plugins.test_impala import column

SMALL = ("rollout_fragment_length=8", "train_batch_size=64", "tuned=none")
RUN = ["algo=impala", "env=cartpole", *SMALL, "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=1"]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        build(compose([*RUN, *words]), Path())
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- what cannot be driven -------------------------------------------------------------------------------------------


def test_an_algorithm_that_corrects_for_no_older_policy_is_refused():
    said = refusal("algo=ppo", "buffer=rollout", "loop=async")
    assert said.startswith("loop: async collects with older weights, but PPO does not correct for that; ")
    assert said.endswith("use loop=alternate or episodes")


def test_an_algorithm_on_segments_that_corrects_for_nothing_is_refused_everywhere(monkeypatch):
    wrong = Needs(data="segments", keys=("obs", "action", "logp"))
    monkeypatch.setattr(IMPALA, "needs", classmethod(lambda cls, cfg, spec: wrong))
    assert "IMPALA does not correct for that" in refusal()
    said = refusal("loop=alternate", "buffer=circular")
    words = "circular gives segments several times, but impala does not correct for older policies; use buffer=queue"
    assert said == f"buffer: {words}"
    said = refusal("loop=alternate", "buffer.replay_proportion=0.5")
    assert said.startswith("buffer.replay_proportion: replays data of older policies, which the algorithm does not")


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["loop.in_flight=3"], 2),
        (["loop.in_flight=5", "replay_ratio=0.0078125"], 2),
        (["loop.in_flight=2", "train_batch_size=16"], 1),  # a sample is whole segments, here of 64
        (["loop.in_flight=5", "train_batch_size=100"], 2),
        (["loop.in_flight=1", "loop.broadcast_interval=100"], 49),
        (["loop.in_flight=2", "buffer=circular", "buffer.num_uses=3"], 3),
    ],
)
def test_a_bound_that_can_never_be_met_is_refused(words, least):
    said = refusal(*words, f"loop.max_staleness={least - 1}")
    assert said.startswith(f"loop.max_staleness: {least - 1} cannot be met: with in_flight=")
    assert said.endswith(f"the average age of segments that arrive is {least}; use {least} or more")
    build(compose([*RUN, *words, f"loop.max_staleness={least}"]), Path()).close()


def test_a_bound_for_a_replay_is_refused():
    """A segment that is left out would leave a gap, and windows would reach over it."""
    words = ["algo=dqn", "loop=async", "replay_ratio=0.25", "loop.max_staleness=100"]
    assert refusal(*words).startswith("loop.max_staleness: drops segments, so that windows of a replay would span")


# ---- how old segments are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_rollouts_that_are_ordered_ahead_are_as_many_updates_old(in_flight, tmp_path):
    train(compose([*RUN, f"loop.in_flight={in_flight}", "total_steps=4096"]), tmp_path)
    if in_flight == 1:
        assert not column(tmp_path, "train/staleness")
        return
    assert column(tmp_path, "train/staleness")[-2] == in_flight - 1
    assert 64 * 0.8 * (in_flight - 1) < column(tmp_path, "train/staleness_steps")[-2] <= 64 * (in_flight - 1)


def test_weights_that_serve_for_several_rounds_grow_old_meanwhile(tmp_path):
    words = ["loop.in_flight=1", "loop.broadcast_interval=3", "loop.max_staleness=2"]
    train(compose([*RUN, *words, "total_steps=8192", "log.every=4096"]), tmp_path)
    assert column(tmp_path, "train/staleness")[0] == pytest.approx(1.0, abs=0.05)
    assert max(column(tmp_path, "train/too_stale")) == 0.0


def test_what_is_older_than_the_bound_is_not_learned_from(tmp_path):
    """Each batch is used four times, so the second segment of the same weights is four updates old when it arrives."""
    words = ["buffer=circular", "buffer.num_batches=1", "buffer.num_uses=4", "loop.max_staleness=3"]
    words = [*words, "loop.in_flight=1", "loop.broadcast_interval=2"]
    train(compose([*RUN, *words, "total_steps=4096"]), tmp_path)
    assert column(tmp_path, "train/too_stale")[-2] == pytest.approx(0.5, abs=0.1)  # every other one is fresh
    assert max(column(tmp_path, "train/age")) <= 3.0 + 3.0  # when it arrives, and while it is used


def test_every_sample_of_the_queue_is_used_and_a_replay_gets_an_update_a_round():
    for words, updates in ((SMALL, 1), ((*SMALL, "train_batch_size=128"), 2), ((*SMALL, "train_batch_size=32"), 1)):
        trainer = Case("impala", "cartpole", words).build()
        play(trainer, 4)
        rounds = trainer.progress.env_steps / 64
        assert rounds == pytest.approx(4 * updates, rel=0.1)
        trainer.close()
    words = ("loop=async", "replay_ratio=null", "num_envs=4", "rollout_fragment_length=4", "tuned=none")
    trainer = Case("dqn", "cartpole", (*words, "num_steps_sampled_before_learning_starts=64")).build()
    play(trainer, 10)
    assert (trainer.progress.env_steps - 64) / 16 == pytest.approx(10, rel=0.1)
    trainer.close()


@pytest.mark.parametrize(
    "words",
    [
        ("algo=impala", "buffer.replay_proportion=1.0"),
        ("algo=appo", "buffer.num_batches=2", "buffer.num_uses=8"),
        ("algo=appo", "replay_ratio=0.03125", "buffer.num_uses=8"),
        ("algo=impala", "train_batch_size=100"),
    ],
    ids=["queue", "ring", "ratio", "whole segments"],
)
def test_the_updates_that_are_announced_are_made(words, tmp_path):
    trainer = build(compose([*RUN, *words]), tmp_path)
    play(trainer, 48)
    announced = trainer.loop.updates(trainer.progress.env_steps)
    trainer.close()
    assert announced == pytest.approx(trainer.progress.updates, rel=0.25)  # a ring begins when it is full


def test_the_weight_delay_counts_the_steps_of_an_actor(tmp_path):
    """Of four actors, each of which has 16 steps of a rollout: twice as many are two rollouts of each."""
    words = ["loop.in_flight=1", "loop.broadcast_interval=100", "loop.max_weight_sync_delay=32"]
    ordered, actors = [], SimpleNamespace(spec=SimpleNamespace(shards=range(4)), in_flight=[0, 1, 1, 1])
    actors.submit = lambda rollout, shards: ordered.append(rollout.version)
    with closing(build(compose([*RUN, *words, "total_steps=100_000"]), tmp_path)) as trainer:
        for _ in range(32):
            trainer.progress.updates += 1
            trainer.orders.submit(actors, "explore")
    assert [*Counter(ordered).values()] == [8, 8, 8, 8]


def test_the_first_weights_serve_as_long_as_later_ones(tmp_path):
    words = ["loop.in_flight=1", "loop.broadcast_interval=3", "total_steps=100_000"]
    ordered, actors = [], SimpleNamespace(spec=SimpleNamespace(shards=range(1)), in_flight=[0])
    actors.submit = lambda rollout, shards: ordered.append(rollout.version)
    with closing(build(compose([*RUN, *words]), tmp_path)) as trainer:
        for _ in range(9):
            trainer.orders.submit(actors, "explore")
            trainer.progress.updates += 1
    assert ordered == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_a_whole_update_is_not_lost_to_rounding():
    assert [updates_of(49 * n, 1.0 / 49) for n in range(1000)] == [*range(1000)]
    assert updates_of(100, 0.29) == 29
    assert updates_of(10**9 - 1, 1e-9) == 0  # what is short of a whole one by more than rounding stays so

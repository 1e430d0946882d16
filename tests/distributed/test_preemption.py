"""Ranks that are late are preempted: when, what they learn from, and that nothing is lost or counted twice."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from rlplug import tree
from rlplug.checkpointing.format import Checkpoint, folder_of, write
from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.loop import preemption
from rlplug.plugins.loop.preemption import FINISHED, Preemptor
from rlplug.run.build import build
from rlplug.run.callbacks import capture, restore
from rlplug.testing.checks.ranks import ask, distances, one_update
from rlplug.testing.checks.resume import full_state
from rlplug.testing.checks.runs import Case, differences, flat, play
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

SMALL = ("num_envs=4", "rollout_fragment_length=16", "env.vectorization=list", "model.hidden=[8]", "tuned=none")
RUN = ("algo=ddppo", "env=cartpole", *SMALL, "algo.sgd_minibatch_size=16", "logger.only=[]", "eval.every=0")
ROUNDS, ROWS = 3, 16


# ---- when ------------------------------------------------------------------------------------------------------------


def rows_played(made: Preemptor, rows: int, finish_at: dict[int, int]) -> int:
    """How many rows a rollout has while so many others finish (``finish_at``) before it asks for a row."""
    played = 0
    with made.rollout(rows) as stop:
        for row in range(rows):
            made.store.add(FINISHED, finish_at.get(row, 0))
            if stop():
                break
            played += 1
    made.store.add(FINISHED, made.ranks - 1 - sum(finish_at.values()))  # the others, later
    return played


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(preemption, "LOOK_S", 0.0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("count", "threshold", "finish_at", "played"),
    [
        (2, 0.6, {9: 1}, 9),  # the only other one
        (2, 0.6, {}, 16),
        (2, 0.0, {}, 16),  # nobody has to be waited for, but somebody has to be finished
        (4, 0.6, {5: 1}, 16),  # one of three others is too few
        (4, 0.6, {5: 1, 9: 1}, 9),
        (4, 1.0, {5: 2, 9: 1}, 9),
        (6, 0.6, {4: 2, 7: 1}, 7),  # 3 of 5: exactly the share, whatever 0.6 * 5 is in floating point
        (4, 0.6, {1: 3}, 4),  # a quarter is played in any case
    ],
)
def test_a_rollout_ends_when_enough_others_have_finished(count, threshold, finish_at, played):
    made = Preemptor(HashStore(), count, threshold, 0.25)
    for _ in range(3):  # the count of a round begins where the last one ended
        assert rows_played(made, ROWS, finish_at) == played
    assert made.drain() == {"preempted": pytest.approx(1 - played / ROWS)}
    assert made.drain() == {"preempted": 0.0}


@pytest.mark.usefixtures("eager")
def test_one_row_is_played_in_any_case():
    assert rows_played(Preemptor(HashStore(), 2, 0.6, 0.0), ROWS, {0: 1}) == 1


def test_others_are_not_looked_at_for_every_row(monkeypatch):
    made, looks = Preemptor(HashStore(), 2, 0.6, 0.0), []
    add = made.store.add
    made.store = SimpleNamespace(add=lambda key, n: looks.append(n) or add(key, n))
    monkeypatch.setattr(preemption, "LOOK_S", 3600.0)
    with made.rollout(ROWS) as stop:
        assert not any(stop() for _ in range(ROWS))
    assert looks == [0, 1]  # one look, and the end of this rollout


# ---- on two ranks ----------------------------------------------------------------------------------------------------


def late(fabric, words, rounds):
    """A run whose second rank waits in every round, at its first step, until the first has played its rollout."""
    preemption.LOOK_S = 0.0
    trainer = build(compose([*words, "hardware=2cpu"]), Path(), fabric)
    player, segments = trainer.collector.player, []
    made: Preemptor = trainer.collector.preemption
    step = player._step

    def waiting(action, number):
        while made.store.add(FINISHED, 0) < 2 * number + 1:
            time.sleep(0.001)
        return step(action)

    for number in range(rounds):
        if fabric.global_rank == 1:
            player._step = partial(waiting, number=number)
        trainer.collect()
        segments.append(tree.map(torch.clone, trainer.buffer._segments[0]))
        trainer.update()
    preemption.LOOK_S = 0.01
    said = trainer.collector.metrics()
    answer = flat(trainer.algorithm.state_dict()), trainer.progress.env_steps, trainer.progress.updates, segments, said
    trainer.close()
    return answer


@pytest.mark.parametrize("more", [(), ("model=lstm", "algo.max_seq_len=4", "model.hidden=8")], ids=["mlp", "lstm"])
def test_a_late_rank_learns_from_what_it_has(more):
    (first, steps, updates, whole, none), (second, *counted, short, some) = ranks(2)(late, (*RUN, *more), ROUNDS)
    assert distances(first, second) == []
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert counted == [steps, updates]
    assert steps == sum(int(segment["valid"].sum()) for segment in (*whole, *short))
    assert updates == ROUNDS
    for segment in short:
        assert segment["valid"][:4].any(0).all()  # a quarter is played in any case
        assert not segment["valid"][4:].any()
    assert all(segment["valid"][12:16].any() for segment in whole)
    for before, after in pairwise(short):
        assert torch.equal(before["obs"][4], after["obs"][0])  # the stream goes on behind the last row played
    assert none == {"preempted": 0.0}
    assert some == {"preempted": 0.75}


def test_short_and_whole_rollouts_make_the_gradient_of_all_their_rows():
    """One process that has both, one beside the other, makes the same update as two ranks with one each."""
    question = ask(Case("ppo", "cartpole", ("rollout_fragment_length=16", "algo.sgd_minibatch_size=32")))
    question["sample"]["valid"][5:, 4:] = False
    alone = one_update(one_rank(), question)
    for answer in ranks(2)(one_update, question):
        assert distances(alone, answer) == []


@pytest.mark.usefixtures("eager")
def test_a_run_that_is_preempted_resumes_where_it_was(tmp_path):
    """Where the other rank is always faster, to the last bit; as one process that is told of another rank."""

    def preempted() -> Trainer:
        trainer = build(compose([*RUN, "hardware=cpu"]), Path())
        trainer.collector.preemption = Preemptor(HashStore(), 2, 0.6, 0.25)
        return trainer

    def rounds(trainer: Trainer, count: int) -> None:
        for _ in range(count):
            trainer.collector.preemption.store.add(FINISHED, 1)
            trainer.collect()
            trainer.update()

    first, resumed, undisturbed = preempted(), preempted(), preempted()
    rounds(first, 2)
    restore(resumed, Checkpoint(write(folder_of(tmp_path, 1), capture(first))))
    rounds(resumed, 2)
    rounds(undisturbed, 4)
    assert undisturbed.progress.env_steps <= 4 * 4 * 4  # a quarter of 16 rows, of 4 environments
    assert differences(full_state(undisturbed), full_state(resumed)) == []
    for trainer in (first, resumed, undisturbed):
        trainer.close()


# ---- what has nobody to preempt, and what cannot be ------------------------------------------------------------------


def test_it_is_ppo_with_one_option_of_the_loop():
    words = ["env=cartpole", "hydra.run.dir=run"]
    run, ppo = (compose([f"algo={name}", *words]).raw for name in ("ddppo", "ppo"))
    assert run["loop"].pop("preemption_threshold") == 0.6
    assert ppo["loop"].pop("preemption_threshold") is None
    assert run == ppo  # with what is tuned for the pair


def test_in_one_process_it_is_ppo_to_the_last_bit():
    made = []
    for name in ("ddppo", "ppo"):
        trainer = build(compose([*RUN, f"algo={name}", "hardware=cpu"]), Path())
        assert trainer.collector.preemption is None
        play(trainer, 3)
        made.append(trainer.algorithm.state_dict())
        trainer.close()
    assert differences(*made) == []


def preempts(fabric, words):
    trainer = build(compose([*words, "hardware=2cpu"]), Path(), fabric)
    own = getattr(trainer.collector, "own", trainer.collector)
    answer = getattr(own, "preemption", None) is not None
    trainer.close()
    return answer


def test_ranks_that_share_one_collection_preempt_nobody():
    assert ranks(2)(preempts, RUN) == [True, True]
    assert ranks(2)(preempts, (*RUN, "num_envs=3", "algo.sgd_minibatch_size=8")) == [False, False]
    assert ranks(2)(preempts, (*RUN, "loop=alternate")) == [False, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=dqn", "loop=preemptive"], "needs an algorithm that learns from whole rollouts; use null"),
        (["algo=ppo", "loop=preemptive", "loop.in_flight=2"], "needs loop.in_flight=1; use null"),
        (
            ["algo=ddppo", "hardware=2cpu", "hardware.actors.count=2"],
            "ends rollouts of ranks, but actors collect here; use hardware.actors.count=0 or null",
        ),
    ],
)
def test_what_cannot_be_preempted_is_refused(words, message):
    with pytest.raises(ConfigError) as error:
        build(compose([*words, "env=cartpole"]), Path())
    assert str(error.value) == f"loop.preemption_threshold: {message}"

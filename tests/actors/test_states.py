"""What an actor is given and what it says: devices, states that stay as they were, generators, and what the learner
makes of the words of several. Nothing here needs Ray."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from rlplug.actors.actor import Actor, Copy, Examiner, device_of
from rlplug.api import Plan
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.config import RunConfig, compose
from rlplug.distributed.rng import global_generators, set_global_generators
from rlplug.evaluation.evaluator import Stopped
from rlplug.registry.installed import installed
from rlplug.run.build import build
from rlplug.testing.checks.runs import differences
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError
from tests.actors.conftest import TWO

SAC = ("algo=sac", "env=pendulum", "num_envs=4", "logger=[]", "eval.episodes=2")
CONFIG = compose((*SAC, "model.hidden=[8]", "exploration=[parameter_noise]", "preprocess.normalize_obs=true"))
CPU = torch.device("cpu")
Kind = TypeVar("Kind", bound=Copy)


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """An actor has its process to itself."""
    before = global_generators(CPU)
    yield
    set_global_generators(before, CPU)


@pytest.fixture
def learner() -> Iterator[Trainer]:
    with closing(build(CONFIG, Path())) as trainer:
        yield trainer


def made(kind: type[Kind], env_ids: Sequence[int], config: RunConfig = CONFIG) -> Kind:
    copy = kind()
    copy.build(config.raw, env_ids, Plan(), [], installed())
    return copy


def said(trainer: Trainer) -> dict:
    return trainer.policy.statistics() | {"env_steps": 0}


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_an_actor_acts_on_a_gpu_only_if_it_was_given_one(monkeypatch: pytest.MonkeyPatch):
    """Ray hides the GPUs of its machine from nobody who was given none."""
    plan = compose((*SAC, *TWO)).hardware.build(None).plan()
    given = replace(plan, actors=replace(plan.actors, num_gpus=0.5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_of(p).type for p in (plan, given)] == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(given).type == "cpu"


def test_statistics_that_are_kept_stay_as_they_were(learner: Trainer):
    kept = learner.policy.statistics()
    before = copy_to_host(kept)
    learner.collect()
    learner.collect()
    assert not differences(kept, before)
    now = learner.policy.statistics()
    assert {"preprocess", "exploration"} <= {name.partition(".")[0] for name in differences(now, before)}


def test_what_actors_collected_does_not_go_on_without_them(learner: Trainer):
    with pytest.raises(ConfigError, match=r"hardware\.actors\.count: the run was collected by 2 actors to a rank"):
        learner.collector.load({"actors": [{}, {}], "env": "actors"})


# ---- examiners -------------------------------------------------------------------------------------------------------


def test_an_evaluation_stops_at_the_next_row(learner: Trainer):
    env, rows = learner.evaluator.begin(), []
    step = env.step
    env.step = lambda action: rows.append(action) or step(action)  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        learner.evaluator.play(0, stop=lambda: len(rows) >= 5)
    assert len(rows) == 5


def test_an_examiner_has_its_environments_at_once_and_tells_of_every_row(learner: Trainer):
    examiner = made(Examiner, range(2))
    assert examiner.evaluator.env is not None
    played, _ = examiner.collect(7, "greedy", said(learner), learner.policy.weights())
    assert played == learner.evaluator.play(7)
    assert examiner.word()[0] >= max(length for _, length in played) == 200


# ---- generators ------------------------------------------------------------------------------------------------------


def test_actors_draw_other_numbers_but_each_the_same_again():
    first, second, again = [(made(Actor, env_ids), drawn())[1] for env_ids in (range(2), range(2, 4), range(2))]
    assert first == again
    assert not set(first) & set(second)


def test_an_actor_made_anew_draws_on(learner: Trainer):
    actor = made(Actor, range(2))
    drawn()
    _, pickled = actor.collect(3, "explore", said(learner), learner.policy.weights())
    state = pickle.loads(pickled)
    expected = drawn()
    other = made(Actor, range(2))
    other.load(state)
    assert drawn() == expected
    del state["global"]  # as of older runs
    other.load(state)


def test_an_evaluation_that_is_played_again_draws_the_same(learner: Trainer):
    examiner = made(Examiner, range(2))
    numbers = []
    for number in (3, 3, 4):
        examiner.collect(number, "greedy", said(learner), learner.policy.weights())
        numbers.append(drawn())
    assert numbers[0] == numbers[1]
    assert not set(numbers[0]) & set(numbers[2])


# ---- what the learner hears ------------------------------------------------------------------------------------------


def test_what_all_actors_agree_on_is_not_rounded(learner: Trainer):
    rounded = next(x for x in torch.linspace(0.01, 0.1, 100) if torch.stack([x] * 7).mean() != x)
    learner.policy.hear([{"exploration": {"parameter_noise": {"sigma": rounded}}}] * 7)
    assert learner.exploration["parameter_noise"].sigma == rounded


def test_the_learner_keeps_what_it_changed_while_actors_played(learner: Trainer):
    """They were asked before it did."""
    noise: Any = learner.exploration["parameter_noise"]
    actors = [made(Actor, ids) for ids in (range(2), range(2, 4))]
    asked, weights = said(learner), learner.policy.weights()
    noise.sigma.fill_(0.7)
    states = [pickle.loads(actor.collect(3, "explore", asked, weights)[1]) for actor in actors]
    learner.policy.hear(states)
    assert noise.sigma == torch.tensor(0.7)
    assert noise.rounds == 1
    assert noise.seed != 0
    measured: list[Any] = [actor.policy.exploration["parameter_noise"].excess for actor in actors]
    assert measured[0] != measured[1]
    assert noise.excess == torch.stack(measured).mean()

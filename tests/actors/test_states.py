"""What an actor is given and returns: devices, states, generators, and how the learner merges several of them.

Nothing here needs Ray.
"""

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

from rlplug import script
from rlplug.actors import copies
from rlplug.actors.actor import Actor, EvalActor, RemotePolicy, actor_device
from rlplug.api import Plan
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.collection.play import Stopped
from rlplug.config import RunConfig, compose
from rlplug.distributed.rng import global_state, load_global_state
from rlplug.evaluation.evaluator import Evaluator
from rlplug.registry.discovery import installed
from rlplug.run.build import build
from rlplug.testing.checks.runs import differences
from rlplug.trainer.trainer import Trainer
from tests.actors.conftest import TWO

SAC = ("algo=sac", "env=pendulum", "num_envs=4", "logger.only=[]", "eval.episodes=2")
CONFIG = compose((*SAC, "model.hidden=[8]", "exploration=[parameter_noise]", "preprocess.normalize_obs=true"))
CPU = torch.device("cpu")
Kind = TypeVar("Kind", bound=RemotePolicy)


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Restore the global generators: an actor has a process of its own."""
    before = global_state(CPU)
    yield
    load_global_state(before, CPU)


@pytest.fixture
def learner() -> Iterator[Trainer]:
    with closing(build(CONFIG, Path())) as trainer:
        yield trainer


@pytest.fixture
def evaluator(learner: Trainer) -> Evaluator:
    return learner.reports.evaluation.evaluator  # type: ignore[attr-defined]


def make(kind: type[Kind], learner: Trainer, env_ids: Sequence[int], config: RunConfig = CONFIG) -> Kind:
    actor = kind()
    actor.build(config.raw, script.dumps(), pickle.dumps(learner.resolved.spec), env_ids, Plan(), [], installed())
    return actor


def statistics(trainer: Trainer) -> dict:
    return copies.statistics(trainer.policy) | {"env_steps": 0, "tasks": None}


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_an_actor_uses_a_gpu_only_if_it_was_given_one(monkeypatch: pytest.MonkeyPatch):
    """Ray also shows the GPUs of its machine to actors that were given none."""
    plan = compose((*SAC, *TWO)).hardware.build(None).plan()
    with_gpu = replace(plan, actors=replace(plan.actors, num_gpus=0.5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [actor_device(p).type for p in (plan, with_gpu)] == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert actor_device(with_gpu).type == "cpu"


def test_statistics_are_copies(learner: Trainer):
    kept = copies.statistics(learner.policy)
    before = copy_to_host(kept)
    learner.collect()
    learner.collect()
    assert not differences(kept, before)
    now = copies.statistics(learner.policy)
    assert {"normalizer", "exploration"} <= {name.partition(".")[0] for name in differences(now, before)}


# ---- evaluation actors -----------------------------------------------------------------------------------------------


def test_an_evaluation_stops_at_the_next_row(evaluator: Evaluator):
    env, rows = evaluator.begin(), []
    step = env.step
    env.step = lambda action: rows.append(action) or step(action)  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        evaluator.play(evaluator.job, 0, stop=lambda: len(rows) >= 5)
    assert len(rows) == 5


def test_an_evaluation_actor_builds_its_environments_at_once_and_counts_rows(learner: Trainer, evaluator: Evaluator):
    actor = make(EvalActor, learner, range(2))
    assert actor.evaluator.player._shards
    played, _ = actor.collect(7, "greedy", statistics(learner), copies.acting_weights(learner.policy))
    whole = evaluator.play(evaluator.job, 7)
    assert {key: x.tolist() for key, x in played.items()} == {key: whole[key].tolist() for key in ("return", "length")}
    assert actor.heartbeat()[0] >= played["length"].max() == 200


# ---- generators ------------------------------------------------------------------------------------------------------


def test_actors_draw_different_numbers_and_each_one_the_same_again(learner: Trainer):
    first, second, again = [(make(Actor, learner, env_ids), draw())[1] for env_ids in (range(2), range(2, 4), range(2))]
    assert first == again
    assert not set(first) & set(second)


def test_a_restarted_actor_continues_its_generators(learner: Trainer):
    actor = make(Actor, learner, range(2))
    draw()
    _, pickled = actor.collect(3, "explore", statistics(learner), copies.acting_weights(learner.policy))
    state = pickle.loads(pickled)
    expected = draw()
    other = make(Actor, learner, range(2))
    other.load(state)
    assert draw() == expected


def test_an_evaluation_that_is_repeated_draws_the_same_numbers(learner: Trainer):
    actor = make(EvalActor, learner, range(2))
    numbers = []
    for number in (3, 3, 4):
        actor.collect(number, "greedy", statistics(learner), copies.acting_weights(learner.policy))
        numbers.append(draw())
    assert numbers[0] == numbers[1]
    assert not set(numbers[0]) & set(numbers[2])


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_equal_values_of_all_actors_are_not_rounded(learner: Trainer):
    rounded = next(x for x in torch.linspace(0.01, 0.1, 100) if torch.stack([x] * 7).mean() != x)
    copies.merge_exploration(learner.policy, [{"exploration": {"parameter_noise": {"sigma": rounded}}}] * 7)
    assert learner.policy.exploration["parameter_noise"].sigma == rounded


def test_the_learner_keeps_what_it_changed_while_actors_played(learner: Trainer):
    """Their statistics are from before the change."""
    noise: Any = learner.policy.exploration["parameter_noise"]
    actors = [make(Actor, learner, ids) for ids in (range(2), range(2, 4))]
    before, weights = statistics(learner), copies.acting_weights(learner.policy)
    noise.sigma.fill_(0.7)
    states = [pickle.loads(actor.collect(3, "explore", before, weights)[1]) for actor in actors]
    copies.merge_exploration(learner.policy, states)
    assert noise.sigma == torch.tensor(0.7)
    assert noise.rounds == 1
    assert noise.seed != 0
    excess: list[Any] = [actor.policy.exploration["parameter_noise"].excess for actor in actors]
    assert excess[0] != excess[1]
    assert noise.excess == torch.stack(excess).mean()

"""A run's choice of an optimizer reaches every Adam, and nothing else."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from rlplug.config import compose
from rlplug.nn import Adam
from rlplug.nn.muon import Muon
from rlplug.run.build import build
from rlplug.types import ConfigError

SMALL = ("tuned=none", "model.hidden=[8]", "logger.only=[]")


def made(*words: str):
    return closing(build(compose([*words, *SMALL]), Path()))


def test_it_replaces_the_adam_of_algorithm_and_exploration_with_their_schedules():
    with made("algo=ppo", "env=pendulum", "exploration=[rnd]", "optimizer=muon", "algo.lr=[[0, 1], [9, 0]]") as trainer:
        learner, algorithm = trainer.learner, trainer.algorithm
        (policy,), (predictor,) = (learner.parts(x).values() for x in (algorithm, *learner.exploration.values()))
        assert type(policy.optim.optimizer) is type(predictor.optim.optimizer) is Muon
        assert policy.optim.optimizer.param_groups[0]["lr"] is algorithm.lr
        assert policy.optim.optimizer.param_groups[0]["eps"] == 1e-5  # as PPO's Adam
        assert {id(p) for p in policy.params} == {id(p) for p in algorithm.parameters()}


def test_by_default_it_is_what_the_algorithm_made():
    with made("algo=ppo", "env=pendulum") as trainer:
        assert type(trainer.learner.parts(trainer.algorithm)["policy"].optim.optimizer) is Adam


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("algo=a2c", "optimizer=sgd"), "optimizer: replaces Adam, but the algorithm chooses RMSprop itself; use"),
        (("algo=cem", "optimizer=sgd"), "optimizer: replaces Adam, but cem makes no gradient steps; leave it out"),
        (("algo=ppo", "optimizer=sdg"), "optimizer: 'sdg' is none of the options"),
        (("algo=ppo", "optimizer=sgd", "+optimizer_options.lr=1"), "optimizer_options.lr: is no option of sgd"),
        (("algo=ppo", "+optimizer_options.alpha=0.9"), "optimizer_options.alpha: is no option of adam"),
    ],
)
def test_what_it_cannot_do_is_refused_before_a_run(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)), made("env=cartpole", *words):
        pass


def test_policies_of_agents_refuse_wrong_options_before_a_run():
    words = "algo=independent", "env=two_carts", "optimizer=sgd", "+optimizer_options.momentun=0.9"
    with pytest.raises(ConfigError, match="did you mean momentum"), made(*words):
        pass

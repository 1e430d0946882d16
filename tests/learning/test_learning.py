"""Learning on real environments. The kit's probes, which run always, compare what is learned with exact solutions."""

from __future__ import annotations

import statistics

import pytest

from rlplug.config import compose
from rlplug.plugins.algo.sac import SAC
from rlplug.run.launch import train

QUIET = ["logger.only=[]", "eval.every=0"]


@pytest.mark.slow
def test_ppo_balances_the_pole(tmp_path):
    score = train(compose(["algo=ppo", "env=cartpole", "total_steps=40_000", "seed=1", *QUIET]), tmp_path)
    assert score >= 400


class Sequential(SAC):
    """The original order: critics first, then policy and temperature by the critics that have just moved."""

    def update(self, batch, learner):
        losses = learner.minimize(batch, self, ("critic",))
        rest = learner.minimize(batch, self, ("actor", "alpha"))
        losses.terms |= rest.terms
        return losses


MEANS: dict[type, float] = {}


@pytest.mark.slow
@pytest.mark.parametrize("which", [SAC, Sequential])
def test_sac_in_one_graph_learns_what_the_sequential_original_learns(which, tmp_path):
    """Pendulum-v1, 3 seeds each: both means within the spread that seeds alone have, and both learned."""
    reached = []
    for seed in (1, 2, 3):
        config = compose(["algo=sac", "env=pendulum", "total_steps=8_000", f"seed={seed}", *QUIET])
        object.__setattr__(config.algo, "cls", which)
        reached.append(train(config, tmp_path / str(seed)))
    MEANS[which] = statistics.mean(reached)
    assert MEANS[which] >= -200
    assert max(MEANS.values()) - min(MEANS.values()) < 60

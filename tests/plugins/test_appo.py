"""APPO beside its paper: three policies, and a target that moves now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from rlplug import testing
from rlplug.config import compose
from rlplug.functional import clipped_surrogate, vtrace
from rlplug.plugins.algo.appo import APPO
from rlplug.run.build import build
from rlplug.types import ConfigError
from tests.plugins.acting import T, learner_of, move, segment, weights
from tests.plugins.test_actor_critics import make as made


def make(spec=None, overrides=(), **changes) -> APPO:
    return made("appo", spec, overrides, **changes)


def prepared(algorithm: APPO, batch):
    with torch.no_grad():
        return algorithm.prepare(batch)


# ---- the objective ---------------------------------------------------------------------------------------------------


def test_the_ratio_by_hand():
    """Worker 0.2, target 0.4, learned 0.5: ``min(0.2 / 0.4, 2) * 0.5 / 0.2 = 1.25``, the learned to the target's.

    Worker 0.9, target 0.3, learned 0.6: ``min(0.9 / 0.3, 2) * 0.6 / 0.9 = 1.333``, where that would be 2.
    """
    algorithm = make(testing.spec(3, 3), clip_param=0.1, entropy_coeff=0.0)
    learned = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.1, 0.6]]).log()
    algorithm.net.forward = lambda rows, carry: (algorithm_dist(learned), torch.zeros(2))
    algorithm_dist = algorithm.net.policy(torch.zeros(1, algorithm.net.torso.out_dim)).rebuild
    batch = {"logp": torch.tensor([0.2, 0.9]).log(), "target_logp": torch.tensor([0.4, 0.3]).log()}
    batch |= {"action": torch.tensor([0, 2]), "dist": learned, "advantage": torch.tensor([-1.0, 2.0])}
    batch |= {"returns": torch.zeros(2)}
    losses = algorithm.forward(batch, ("policy",))
    assert_close(losses.terms["policy"], torch.tensor([1.25, -2.2]))
    assert_close(losses.metrics["clip_fraction"], torch.ones(2))


@pytest.mark.parametrize(("overrides", "shared"), [([], True), (["model=lstm"], False)], ids=["mlp", "lstm"])
def test_the_terms_are_those_of_the_paper(overrides, shared):
    algorithm = make(overrides=overrides, vf_share_layers=shared, kl_coeff=0.2, entropy_coeff=0.1, max_seq_len=T + 1)
    batch = segment(algorithm)
    move(algorithm)  # the worker is behind, and the target elsewhere
    rows = prepared(algorithm, batch)
    value = algorithm.values(batch)
    log_rho = rows["target_logp"] - batch["logp"]
    returns, advantage = vtrace(log_rho, batch["reward"], value, batch["terminated"], batch["valid"], 0.99)
    assert log_rho.abs().max() > 0.01
    assert_close(rows["advantage"], advantage)
    assert_close(rows["returns"], returns)
    move(algorithm.net)
    losses = algorithm.forward(rows, ("policy",))
    logp, ratio = algorithm.logp(batch), (-log_rho).exp().clamp(max=2.0)
    surrogate = clipped_surrogate(ratio * (logp - batch["logp"]).exp(), advantage, 0.4)
    assert_close(losses.terms["policy"], -surrogate)
    assert_close(losses.terms["value"], 0.5 * (algorithm.values(batch) - returns).square())
    assert_close(losses.terms["entropy"], -0.1 * losses.metrics["mean_entropy"])
    assert_close(losses.terms["kl_penalty"], 0.2 * losses.metrics["kl"])
    assert losses.metrics["kl"].max() > 1e-4


# ---- the target ------------------------------------------------------------------------------------------------------


def test_the_target_moves_when_it_is_due_and_no_gradient_reaches_it():
    algorithm = make(target_update_period=3, tau=0.5, lr=1e-2)
    learner, batch = learner_of(algorithm), segment(algorithm)
    start = weights(algorithm.target)
    for update in range(1, 7):
        before = weights(algorithm.target)
        algorithm.update(prepared(algorithm, batch), learner)
        learner.progress.updates += 1
        after = weights(algorithm.target)
        if update % 3:
            assert torch.equal(before, after)
        else:
            assert_close(after, 0.5 * (before + weights(algorithm.net)))
    assert not torch.equal(start, after)


def test_the_kl_coefficient_adapts_with_the_target():
    for target, expected in ((1e3, 0.1), (1e-9, 0.3)):
        algorithm = make(kl_coeff=0.2, kl_target=target, target_update_period=2, lr=1e-2)
        learner, batch = learner_of(algorithm), segment(algorithm)
        for _ in range(2):
            assert float(algorithm.kl_coeff) == pytest.approx(0.2)
            algorithm.update(prepared(algorithm, batch), learner)
            learner.progress.updates += 1
        assert float(algorithm.state_dict()["kl_coeff"]) == pytest.approx(expected)


def test_actors_do_without_the_target():
    assert not [name for name in make().actor_keys() if name.startswith("target.")]
    assert make().actor_keys()


# ---- data ------------------------------------------------------------------------------------------------------------


def test_a_ring_of_no_batch_is_refused():
    with pytest.raises(ConfigError, match=r"buffer\.num_batches: 0 is out of range"):
        build(compose(["algo=appo", "env=cartpole", "buffer.num_batches=0"]), Path())

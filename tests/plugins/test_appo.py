"""APPO beside its paper: three policies, and a target that moves now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.functional import clipped_surrogate, gae, vtrace
from rlplug.plugins.algo.appo import APPO
from rlplug.run.build import build
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError
from tests.plugins.acting import B, T, move, segment

torsos = pytest.mark.parametrize(
    ("overrides", "shared"),
    [([], False), ([], True), (["model=lstm"], False), (["model=lstm"], True), (["model@critic_model=gru"], False)],
    ids=["mlp", "mlp shared", "lstm", "lstm shared", "memory of the critic"],
)


def make(spec=None, overrides=(), **changes) -> APPO:
    torch.manual_seed(0)
    spec = spec or testing.spec(3, 2)
    cfg = testing.config("algo/appo", **{"max_seq_len": 8, "normalize_advantage": False, **changes})
    needs = APPO.needs(cfg, spec)
    if any("lstm" in word or "gru" in word for word in overrides):
        needs = APPO.recurrent(cfg, needs)
    return APPO(cfg, testing.context(spec, overrides=overrides, needs=needs, num_envs=B, rollout_length=T))


def learner_of(algorithm: APPO) -> RankLearner:
    return RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)


def prepared(algorithm: APPO, batch):
    with torch.no_grad():
        return algorithm.prepare(batch)


# ---- the objective ---------------------------------------------------------------------------------------------------


@torsos
def test_the_policy_judges_as_it_acted_while_its_weights_are_the_same(overrides, shared):
    algorithm = make(overrides=overrides, vf_share_layers=shared)
    batch = segment(algorithm)
    assert_close(algorithm.logp(batch), batch["logp"])
    assert_close(prepared(algorithm, batch)["target_logp"], batch["logp"])
    move(algorithm)
    assert (algorithm.logp(batch) - batch["logp"]).abs().max() > 1e-3
    assert algorithm.values(batch).shape == (T + 1, B)


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


@torsos
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


def test_gae_takes_the_segment_as_the_targets():
    algorithm = make(vtrace=False, lambda_=0.8, gamma=0.9)
    batch = segment(algorithm)
    move(algorithm)
    rows = batch["reward"], algorithm.values(batch), batch["terminated"], batch["valid"]
    advantage, returns = gae(*rows, 0.9, 0.8)
    assert_close(prepared(algorithm, batch)["advantage"], advantage)
    assert_close(prepared(algorithm, batch)["returns"], returns)


def test_advantages_are_normalized_over_valid_rows():
    algorithm = make(normalize_advantage=True)
    learner, seen = learner_of(algorithm), []
    minimize = learner.minimize
    learner.minimize = lambda batch, *rest: seen.append(batch) or minimize(batch, *rest)
    algorithm.update(prepared(algorithm, segment(algorithm)), learner)
    a = seen[0]["advantage"][seen[0]["valid"]]
    assert_close(a.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    assert_close(a.std(correction=0), torch.tensor(1.0))


@pytest.mark.parametrize("overrides", [[], ["model=lstm"]])
def test_invalid_rows_change_nothing(overrides):
    algorithm, other = make(overrides=overrides), make(overrides=overrides)
    batch = segment(algorithm)
    segment(other)  # both have drawn the same noise
    changed = tree.map(torch.clone, batch)
    for key in ("reward", "logp", "action"):
        changed[key][5, 2] = changed[key][9, 3] = changed[key][-1] = 1 if key == "action" else 1e3
    for of, rows in ((algorithm, batch), (other, changed)):
        of.update(prepared(of, rows), learner_of(of))
    for a, b in zip(algorithm.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [1, 4, 5, 16])
def test_chunks_unroll_to_what_acted(length):
    algorithm = make(overrides=["model=lstm"], max_seq_len=length)
    learner, seen = learner_of(algorithm), []
    learner.minimize = lambda batch, who: seen.append(batch) or who.forward(batch, ("policy",))
    algorithm.update(prepared(algorithm, segment(algorithm)), learner)
    (batch,) = seen
    valid = batch["valid"]
    assert valid.shape == (length, B * -(-T // length))
    assert int(valid.sum()) == T * B - 2
    metrics = algorithm.forward(batch, ("policy",)).metrics
    assert_close(metrics["kl"][valid], torch.zeros(T * B - 2), rtol=0, atol=1e-6)


def test_masks_are_heeded():
    algorithm = make(testing.spec(3, spaces.Discrete(4)), entropy_coeff=0.1, kl_coeff=0.1)
    mask = torch.ones(T + 1, B, 4, dtype=torch.bool)
    mask[..., 1] = False
    batch = segment(algorithm, mask)
    assert (batch["action"] != 1).all()
    losses = algorithm.forward(prepared(algorithm, batch), ("policy",))
    sum(term[batch["valid"]].mean() for term in losses.terms.values()).backward()
    assert not algorithm.net.policy.linear.weight.grad[1].any()
    assert algorithm.net.policy.linear.weight.grad[0].any()


def test_update_makes_the_rewarded_action_more_likely():
    algorithm = make(lr=1e-2, gamma=0.0, target_network_update_freq=4)
    batch = segment(algorithm)
    batch["reward"] = (batch["action"] == 1).float()
    learner = learner_of(algorithm)
    for _ in range(40):
        algorithm.update(prepared(algorithm, batch), learner)
        learner.progress.updates += 1
    ones = batch | {"action": torch.ones_like(batch["action"])}
    assert algorithm.logp(ones).exp().mean() > 0.6


# ---- the target ------------------------------------------------------------------------------------------------------


def weights(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_the_target_moves_when_it_is_due_and_no_gradient_reaches_it():
    algorithm = make(target_network_update_freq=3, tau=0.5, lr=1e-2)
    learner, batch = learner_of(algorithm), segment(algorithm)
    start = weights(algorithm.target)
    for update in range(1, 7):
        before = weights(algorithm.target)
        algorithm.update(prepared(algorithm, batch), learner)
        learner.progress.updates += 1
        after = weights(algorithm.target)
        if update % 3:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            for a, b, net in zip(before, after, weights(algorithm.net), strict=True):
                assert_close(b, 0.5 * (a + net))
    assert not all(torch.equal(a, b) for a, b in zip(start, weights(algorithm.target), strict=True))


def test_the_kl_coefficient_adapts_with_the_target():
    for target, expected in ((1e3, 0.1), (1e-9, 0.3)):
        algorithm = make(kl_coeff=0.2, kl_target=target, target_network_update_freq=2, lr=1e-2)
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


def test_rows_without_the_log_probabilities_of_who_acted_are_refused():
    algorithm = make()
    batch = segment(algorithm)
    del batch["logp"]
    with pytest.raises(ConfigError, match=r"buffer: gives rows without logp.*ratios divide by; collect them with"):
        algorithm.prepare(batch)


def test_a_ring_of_no_batch_is_refused():
    with pytest.raises(ConfigError, match=r"buffer\.num_batches: 0 is out of range"):
        build(compose(["algo=appo", "env=cartpole", "buffer.num_batches=0"]), Path())


LSTM = ("model=lstm", "model.hidden=8")
RMSPROP = ("algo.opt_type=rmsprop", "algo.momentum=0.5")


@pytest.mark.parametrize("words", [(), ("buffer=queue",), LSTM, ("algo.kl_coeff=0.2",), RMSPROP])
def test_it_resumes_bit_for_bit(words):
    common = ("rollout_fragment_length=8", "train_batch_size=64", "algo.target_network_update_freq=3")
    check_resumes(Case("appo", "cartpole", (*common, *words)), updates=5)

"""A2C beside its paper: the losses of a rollout, worked out by hand; one pass for all of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlplug import testing, tree
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.algo.a2c import A2C
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError
from tests.plugins.acting import B, T, segment

MODELS = {"mlp": [], "lstm": ["model=lstm"], "memory of the critic": ["model=mlp", "model@critic_model=gru"]}
by_model = pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)


def make(overrides=(), **changes) -> A2C:
    torch.manual_seed(0)
    spec, cfg = testing.spec(3, 2), testing.config("algo/a2c", **changes)
    needs = A2C.needs(cfg, spec)
    if any("lstm" in word or "gru" in word for word in overrides):
        needs = A2C.recurrent(cfg, needs)
    words = ["algo=a2c", *overrides]
    return A2C(cfg, testing.context(spec, overrides=words, needs=needs, num_envs=B, rollout_length=T))


def learner_of(algorithm: A2C, microbatches: int = 1) -> RankLearner:
    return RankLearner(
        fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None, microbatches=microbatches
    )


def weights(algorithm: A2C) -> torch.Tensor:
    return nn.utils.parameters_to_vector(algorithm.parameters()).detach().clone()


# ---- the losses -----------------------------------------------------------------------------------------------------


def plain(**changes) -> A2C:
    """Its policy is uniform over two actions, and its values are 1/2."""
    algorithm = make(gamma=0.5, **changes)
    with torch.no_grad():
        for layer in (algorithm.net.policy.linear, algorithm.net.value):
            layer.weight.zero_()
            layer.bias.zero_()
        algorithm.net.value.bias.fill_(0.5)
    return algorithm


def rollout(terminated: int | None = None, final: int | None = None):
    """Rewards 1, 2, 3 in one column: which row's action ended the episode for good, which row is a final one."""
    batch = {"obs": torch.randn(4, 1, 3), "action": torch.zeros(4, 1, dtype=torch.long)}
    batch["reward"] = torch.tensor([1.0, 2.0, 3.0, torch.nan]).unsqueeze(1)
    batch["terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    batch["valid"] = torch.tensor([True, True, True, False]).unsqueeze(1)
    if terminated is not None:
        batch["terminated"][terminated] = True
    if final is not None:
        batch["valid"][final] = False
    return batch


@pytest.mark.parametrize(
    ("batch", "lambda_", "advantage"),
    [
        (rollout(), 1.0, [2.3125, 3.125, 2.75]),  # returns 1 + 3.625 / 2, 2 + 3.25 / 2, 3 + 0.5 / 2; less 0.5
        (rollout(), 0.0, [0.75, 1.75, 2.75]),  # r + 0.5 / 2 - 0.5
        (rollout(final=2), 1.0, [1.625, 1.75, None]),  # truncated: the final observation has a value
        (rollout(terminated=1, final=2), 1.0, [1.5, 1.5, None]),
    ],
    ids=["n-step", "one step", "truncated", "terminated"],
)
def test_losses_by_hand(batch, lambda_, advantage):
    """``-log pi(a) A``, ``c (V - R)^2`` and ``-beta H``, where ``pi`` is 1/2 and ``V - R`` is minus ``A``."""
    terms = plain(lambda_=lambda_, vf_loss_coeff=0.25, entropy_coeff=0.1).forward(batch, ("policy",)).terms
    for t, a in enumerate(advantage):
        if a is not None:
            found = [terms[name][t].item() for name in ("policy", "value", "entropy")]
            assert found == pytest.approx([math.log(2) * a, 0.25 * a * a, -0.1 * math.log(2)])


def test_without_a_bonus_there_is_no_term_of_it():
    assert plain(entropy_coeff=0.0).forward(rollout(), ("policy",)).terms.keys() == {"policy", "value"}


def test_the_policy_s_loss_gives_the_value_no_gradient_and_the_other_way_round():
    algorithm = make()
    reached = {}
    for name in ("policy", "value"):
        algorithm.zero_grad()
        algorithm.forward(segment(algorithm), ("policy",)).terms[name][:-1].mean().backward()
        found = (key for key, p in algorithm.net.named_parameters() if p.grad is not None and p.grad.any())
        reached[name] = {key.partition(".")[0] for key in found}
    assert reached == {"policy": {"torso", "policy"}, "value": {"value_torso", "value"}}


def test_updates_make_the_rewarded_action_more_likely():
    algorithm = make(lr=1e-2, gamma=0.0)
    learner, batch = learner_of(algorithm), segment(algorithm)
    batch["reward"] = (batch["action"] == 1).float()
    for _ in range(30):
        algorithm.update(batch, learner)
    likely = algorithm.net(batch, {})[0].logp(torch.ones_like(batch["action"])).exp()
    assert likely.mean() > 0.8


@by_model
def test_rows_that_begin_no_transition_change_nothing(overrides):
    found = []
    for junk in (0.0, 1e3):
        algorithm = make(overrides)
        batch = segment(algorithm)
        for row, column in ((5, 2), (9, 3), (T, 0)):
            batch["reward"][row, column], batch["action"][row, column] = junk, int(junk > 0)
        learner_of(algorithm).minimize(batch, algorithm)
        found.append(weights(algorithm))
    assert torch.equal(*found)


# ---- one gradient step ----------------------------------------------------------------------------------------------


@by_model
@pytest.mark.parametrize("opt_type", ["adam", "rmsprop"])
def test_microbatches_are_the_whole_rollout(overrides, opt_type):
    found = []
    for microbatches in (1, 2, 4):
        algorithm = make(overrides, opt_type=opt_type)
        learner, batch = learner_of(algorithm, microbatches), segment(algorithm)
        start = weights(algorithm)
        for _ in range(3):
            losses = algorithm.update(batch, learner)
        found.append((weights(algorithm) - start, losses.terms["policy"], losses.metrics["advantage"]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-6)
    assert found[0][0].abs().max() > 1e-3


def test_the_first_step_of_rmsprop():
    """``m = (1 - decay) g^2`` and ``lr g / (sqrt(m) + epsilon)``."""
    algorithm = make(lr=0.01, decay=0.9, epsilon=0.1, grad_clip=None)
    batch, start = segment(algorithm), weights(algorithm)
    losses = algorithm.forward(batch, ("policy",))
    sum(term[batch["valid"]].mean() for term in losses.terms.values()).backward()
    g = torch.cat([p.grad.flatten() for p in algorithm.parameters()])
    learner_of(algorithm).minimize(batch, algorithm)
    torch.testing.assert_close(weights(algorithm), start - 0.01 * g / ((0.1 * g * g).sqrt() + 0.1))


@pytest.mark.parametrize("opt_type", ["adam", "rmsprop"])
def test_the_step_size_follows_its_schedule(opt_type):
    algorithm = make(opt_type=opt_type, lr=[[0, 0.01], [100, 0.0]])
    learner, batch, start = learner_of(algorithm), segment(algorithm), weights(algorithm)
    algorithm.ctx.schedules.refresh(100)
    learner.minimize(batch, algorithm)
    assert torch.equal(weights(algorithm), start)
    algorithm.ctx.schedules.refresh(50)
    learner.minimize(batch, algorithm)
    assert 0.001 < (weights(algorithm) - start).abs().max() < 0.1


# ---- recurrence -----------------------------------------------------------------------------------------------------


@by_model
def test_one_pass_over_the_rows_is_what_acted(overrides):
    algorithm = make(overrides)
    batch = segment(algorithm)
    losses = algorithm.forward(batch, ("policy",))
    torch.testing.assert_close(losses.terms["policy"], -algorithm.logp(batch) * losses.metrics["advantage"])
    error = (losses.terms["value"] / algorithm.cfg.vf_loss_coeff).sqrt()  # of a target that is value and advantage
    torch.testing.assert_close(error, losses.metrics["advantage"].abs(), rtol=1e-4, atol=1e-5)
    for t in range(T + 1):  # every row by itself, from the state that was stored before it
        row = tree.map(lambda x, t=t: x[t : t + 1], {key: batch[key] for key in batch if key != "reward"})
        torch.testing.assert_close(algorithm.logp(row)[0], algorithm.logp(batch)[t])
        torch.testing.assert_close(algorithm.values(row)[0], algorithm.values(batch)[t])


def test_memory_reaches_back_through_the_rollout_and_no_further_than_its_episode():
    algorithm = make(["model=lstm"])
    batch = segment(algorithm)
    batch["obs"].requires_grad_()
    algorithm.forward(batch, ("policy",)).terms["policy"][T - 1].sum().backward()
    reached = batch["obs"].grad.abs().sum(-1) > 0
    assert reached[:T, :2].all()
    assert reached[:T, 2].tolist() == [False] * 6 + [True] * 10
    assert reached[:T, 3].tolist() == [False] * 10 + [True] * 6
    assert not reached[T].any()


def test_a_memory_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="vf_share_layers"):
        make(["model=mlp", "model@critic_model=lstm"], vf_share_layers=True)

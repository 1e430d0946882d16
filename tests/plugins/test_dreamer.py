"""Dreamer beside its paper: returns of imagined states, gradients through the dynamics, free nats, exploration."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

from rlplug import testing
from rlplug.plugins.algo.dreamer import Dreamer
from rlplug.types import Batch, ConfigError
from tests.contract.worlds import stream
from tests.plugins import acting

ROWS, COLUMNS, STEPS = 6, 3, 4
SIZES = {"deter": 8, "stoch": 4, "hidden": 8, "units": 8, "batch_length": ROWS, "imagination_length": STEPS}


def make(**changes) -> Dreamer:
    return acting.make(Dreamer, "dreamer", testing.spec(3, testing.box(2)), **(SIZES | changes))


def a_sample(algorithm: Dreamer) -> Batch:
    batch = stream(ROWS, COLUMNS)
    batch["carry"] = {key: x[None] for key, x in algorithm.initial_carry(COLUMNS).items()}
    batch["prev_action"] = torch.zeros(ROWS, COLUMNS, 2)
    return batch


def original_returns(reward, value, pcont, bootstrap, lambda_):
    """``tools.lambda_return`` of danijar/dreamer, time first."""
    inputs = reward + pcont * torch.cat([value[1:], bootstrap[None]]) * (1 - lambda_)
    returns, last = [], bootstrap
    for x, p in zip(inputs.flip(0), pcont.flip(0), strict=True):
        last = x + p * lambda_ * last
        returns.append(last)
    return torch.stack(returns).flip(0)


@pytest.mark.parametrize("predict", [False, True])
def test_actor_and_critic_learn_as_in_the_original(predict):
    """As ``_train`` of danijar/dreamer, written out."""
    algorithm = make(predict_discount=predict)
    batch = algorithm.prepare(a_sample(algorithm))
    terms = algorithm(batch, ("actor", "critic")).terms
    with torch.no_grad():
        state = algorithm.states(batch, {k: x[0] for k, x in batch["carry"].items()}, batch["noise"]["states"])
    deter, stoch = (state[key].flatten(0, 1) for key in ("deter", "stoch"))
    noise, feats = {key: x.flatten(0, 1) for key, x in batch["noise"].items()}, []
    for h in range(STEPS):
        policy = algorithm.actor(torch.cat((deter, stoch), -1).detach())
        action = algorithm.squashed(policy, noise["actions"][:, h])
        deter, stoch = algorithm.dynamics(deter, stoch, action, noise["imagined"][:, h])
        feats.append(torch.cat((deter, stoch), -1))
    feat = torch.stack(feats)
    reward, value = algorithm.reward(feat).squeeze(-1), algorithm.critic(feat).squeeze(-1)
    pcont = algorithm.cont(feat).squeeze(-1).sigmoid() if predict else 0.99 * torch.ones_like(reward)
    returns = original_returns(reward[:-1], value[:-1], pcont[:-1], value[-1], 0.95)
    discount = torch.cat([torch.ones_like(pcont[:1]), pcont[:-2]]).detach().cumprod(0)
    torch.testing.assert_close(terms["actor"], -(discount * returns).mean(0).view(ROWS, COLUMNS))
    error = algorithm.critic(feat[:-1].detach()).squeeze(-1) - returns.detach()
    torch.testing.assert_close(terms["critic"], (discount * 0.5 * error.square()).mean(0).view(ROWS, COLUMNS))
    expected = torch.autograd.grad(-(discount * returns).mean(), algorithm.actor.parameters())
    found = torch.autograd.grad(terms["actor"].mean(), algorithm.actor.parameters(), retain_graph=True)
    torch.testing.assert_close(found, expected)
    assert all(g.abs().sum() > 0 for g in found)


@pytest.mark.parametrize(("part", "moved"), [("actor", {"actor"}), ("critic", {"critic"})])
def test_each_part_has_the_gradient_of_its_own_loss(part, moved):
    algorithm = make()
    algorithm(algorithm.prepare(a_sample(algorithm)), (part,)).terms[part].sum().backward()
    assert {name.split(".")[0] for name, p in algorithm.named_parameters() if p.grad is not None} == moved
    assert all(p.requires_grad for p in algorithm.parameters())


def test_the_model_s_losses_by_hand():
    algorithm = make(kl_scale=2.0, predict_discount=True)
    batch = algorithm.prepare(a_sample(algorithm))
    losses = algorithm(batch, ("model",))
    state = algorithm.states(batch, {k: x[0] for k, x in batch["carry"].items()}, batch["noise"]["states"])
    mean, std = algorithm.dynamics.gaussian(algorithm.dynamics.prior(state["deter"]))
    posterior, prior = (torch.distributions.Normal(*pair) for pair in ((state["mean"], state["std"]), (mean, std)))
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    torch.testing.assert_close(losses.terms["kl"], 2.0 * kl)
    x = torch.cat((state["deter"], state["stoch"]), -1)
    likelihood = torch.distributions.Normal(algorithm.reward(x).squeeze(-1), 1.0).log_prob(batch["reward"])
    expected = (-likelihood - 0.5 * math.log(2.0 * math.pi)) * batch["rewarded"]
    torch.testing.assert_close(losses.terms["reward"], expected)
    goes_on, p = 0.99 * (~batch["terminal"]).float(), algorithm.cont(x).squeeze(-1).sigmoid()
    cont = -(goes_on * p.log() + (1.0 - goes_on) * (1.0 - p).log()) * batch["known"]
    torch.testing.assert_close(losses.terms["cont"], 10.0 * cont, atol=1e-4, rtol=1e-4)


def test_the_mean_divergence_of_the_last_update_decides_on_free_nats():
    algorithm = make(free_nats=3.0)
    learner, batch = acting.learner_of(algorithm), algorithm.prepare(a_sample(algorithm))
    assert learner.minimize(batch, algorithm).terms["kl"] > 0.0, "nothing is known before the first update"
    algorithm.kl.fill_(2.9)
    losses = learner.minimize(batch, algorithm)
    assert losses.terms["kl"] == 0.0
    torch.testing.assert_close(algorithm.kl, losses.metrics["kl"])


def test_actions_by_hand():
    algorithm = make(mean_scale=5.0, initial_std=5.0, least_std=0.5)
    out = torch.tensor([[10.0, 0.0, 0.0, -1e3]])
    action = algorithm.squashed(out, torch.tensor([[0.1, 2.0]]))
    mean, std = 5.0 * math.tanh(2.0), [5.0 + 0.5, 0.5]
    expected = torch.tensor([[math.tanh(mean + std[0] * 0.1), math.tanh(std[1] * 2.0)]])
    torch.testing.assert_close(action, expected)
    torch.testing.assert_close(algorithm.squashed(out, None), torch.tensor([[math.tanh(mean), 0.0]]))


def test_exploration_by_hand():
    algorithm = make(explore_noise=0.25, least_std=1e-4)
    certain = torch.tensor([[0.0, 0.0, -1e3, -1e3]]).expand(20_000, 4)
    with torch.no_grad():
        explored, chance = (algorithm._explored(certain, mode) for mode in ("explore", "random"))
    torch.testing.assert_close(explored.std(0), torch.full((2,), 0.25), atol=0.01, rtol=0.0)
    assert algorithm._explored(certain, "greedy").eq(0).all()
    torch.testing.assert_close(chance.var(0), torch.full((2,), 1 / 3), atol=0.01, rtol=0.0)


def test_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match=r"algo: dreamer needs bounded Box actions, but .*; use algo=dreamerv3"):
        acting.make(Dreamer, "dreamer", testing.spec(3, spaces.Discrete(3)), **SIZES)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"batch_length": 1}, "algo.batch_length"), ({"deter": 12}, "algo.deter"), ({"imagination_length": 1}, "algo.im")],
)
def test_what_does_not_fit_is_refused(changes, key):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.key.startswith(key)

"""CQL, IQL and TD3+BC beside their papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.testing import assert_close

from rlplug import testing
from rlplug.nn import FeatureCritic, InputCritic
from rlplug.plugins.algo.cql import CQL
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.iql import IQL
from rlplug.plugins.algo.sac import SAC
from tests.plugins import acting
from tests.plugins.acting import learner_of
from tests.plugins.acting import windows as sample

ALGORITHMS = {"cql": CQL, "iql": IQL, "td3_bc": DDPG, "discrete_cql": DQN, "sac": SAC}
CHOICES = spaces.Discrete(3)
CQL_PARTS, IQL_PARTS = ("critic", "actor", "alpha"), ("critic", "value", "actor")


def make(name, action=None, hidden="[8]", **changes):
    spec = testing.spec(3, action or testing.box(2))
    return acting.make(ALGORITHMS[name], name, spec, ["tuned=none", f"model.hidden={hidden}"], **changes)


# ---- CQL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [True, False])
def test_without_the_term_it_is_sac(entropy):
    """The same losses of the same networks and draws; deterministic targets lack the entropy alone."""
    cql = make("cql", conservative_weight=0, bc_iters=0, deterministic_backup=not entropy, initial_alpha=0.5)
    sac = make("sac")
    shared = {key: value for key, value in cql.state_dict().items() if key in sac.state_dict()}
    sac.load_state_dict(shared)
    batch = cql.prepare(sample(cql))
    found, expected = (algorithm.forward(batch, CQL_PARTS).terms for algorithm in (cql, sac))
    assert found.keys() == expected.keys()
    for key in ("actor", "alpha"):
        assert_close(found[key], expected[key])
    assert torch.allclose(found["critic"], expected["critic"]) == entropy
    assert_close(found["critic"][0], expected["critic"][0])  # it terminated


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_term_is_the_integral_over_all_actions(temperature):
    """Critics without hidden layers are linear in the action, ``b + v a``: the integral is 2 sinh(v / T) T / v."""
    algorithm = make(
        "cql", testing.box(1), hidden="[]", num_actions=20_000, temperature=temperature, conservative_weight=1
    )
    with torch.no_grad():
        algorithm.critic.head.weight[..., -1, :] = 2.0  # the action comes last
    batch = algorithm.prepare(sample(algorithm, n=3))
    q = algorithm.critic(batch["obs"], batch["action"])
    base = algorithm.critic(batch["obs"], torch.zeros(3, 1))
    v = algorithm.critic(batch["obs"], torch.ones(3, 1)) - base
    exact = base + temperature * (2 * torch.sinh(v / temperature) * temperature / v).log() - q
    loss = algorithm.forward(batch, ("critic",))
    assert_close(loss.metrics["conservative"], exact.mean(0), rtol=0.02, atol=0.02)
    algorithm.cfg = replace(algorithm.cfg, conservative_weight=0.0)
    plain = algorithm.forward(batch, ("critic",)).terms["critic"]
    assert_close(loss.terms["critic"] - plain, exact.sum(0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("threshold", "grows"), [(1e-3, True), (1e3, False)])
def test_the_weight_grows_while_the_term_is_above_its_threshold(threshold, grows):
    algorithm = make("cql", lagrangian_thresh=threshold, conservative_weight=2)
    losses = learner_of(algorithm).minimize(algorithm.prepare(sample(algorithm)), algorithm)
    assert losses.metrics["conservative"] > 1e-3
    assert (algorithm.log_weight > math.log(2.0)) == grows
    assert losses.metrics["conservative_weight"] == pytest.approx(2.0)


def test_the_policy_imitates_at_the_start():
    algorithm = make("cql", bc_iters=2)
    batch = algorithm.prepare(sample(algorithm))

    def actor():
        return algorithm.forward(batch, ("actor",)).terms["actor"]

    dist = algorithm.dist(batch["obs"])
    _, logp = dist.sample_and_logp(batch["noise"])
    assert_close(actor(), algorithm.log_alpha.exp() * logp - dist.logp(batch["action"]))
    for moved in (False, True):  # the values do not matter before the second update is made
        learner_of(algorithm).minimize(batch, algorithm, ("critic",))
        before = actor()
        with torch.no_grad():
            algorithm.critic.head.bias += 1.0
        assert torch.equal(before, actor()) != moved


def test_densities_of_explored_and_of_random_actions():
    algorithm = make("cql")
    object.__setattr__(algorithm.ctx.needs, "recorded", ("logp",))
    algorithm.ctx.needs.__dict__.pop("stored", None)
    step = {"obs": torch.randn(4, 3), "is_first": torch.ones(4, dtype=torch.bool)}
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 4, range(4)
    out, _ = algorithm.act(step, {}, "explore")
    assert_close(out["logp"], algorithm.logp({"obs": step["obs"][None], "action": out["action"][None]})[0])
    assert_close(algorithm.act(step, {}, "random")[0]["logp"], torch.full((4,), -2 * math.log(2.0)))
    assert "logp" not in algorithm.act(step, {}, "greedy")[0]


@pytest.mark.parametrize("feature", [False, True])
@pytest.mark.parametrize("members", [1, 2])
def test_critics_judge_several_actions_in_every_row(feature, members):
    class Torso(nn.Module):
        out_dim = 4

        def forward(self, obs, carry, is_first):
            x = torch.cat((obs["obs"], obs["action"]), -1)[..., :4] if isinstance(obs, dict) else obs
            return x if members == 1 else x.expand(members, *x.shape), carry

    critic = FeatureCritic(Torso(), 2, members) if feature else InputCritic(Torso(), members)
    obs, action = torch.randn(5, 4 if feature else 3), torch.randn(7, 5, 2)
    code, _ = critic.encode(obs, {}, None)
    found = critic.several(code, action)
    assert found.shape == (members, 7, 5)
    assert_close(found, torch.stack([critic(code, each) for each in action], 1))


# ---- of Discrete actions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_atoms": 5}, {"dueling": True, "td_error_loss_fn": "mse"}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_term_beside_that_of_dqn(changes, masked):
    mask = torch.tensor([True, False, True]) if masked else None
    algorithm = make("discrete_cql", CHOICES, conservative_weight=0.5, hiddens=[6], **changes)
    batch = sample(algorithm, mask=mask)
    batch["action"] = torch.where(batch["action"] == 1, 2, batch["action"])
    batch = algorithm.prepare(batch)
    with torch.no_grad():
        features, _ = algorithm.online.torso(batch["obs"], {}, None)
        q = algorithm.q(algorithm.online.head(features, True))
    allowed = q[:, [0, 2]] if masked else q
    term = allowed.exp().sum(-1).log() - q[torch.arange(6), batch["action"]]
    found = algorithm.forward(batch, ("critic",))
    algorithm.cfg = replace(algorithm.cfg, conservative_weight=0.0)
    plain = algorithm.forward(batch, ("critic",))
    assert_close(found.terms["critic"] - plain.terms["critic"], 0.5 * term)
    assert_close(found.metrics["conservative"], term)
    assert "conservative" not in plain.metrics
    assert torch.equal(found.feedback["priority"], plain.feedback["priority"])


# ---- IQL ------------------------------------------------------------------------------------------------------------


def test_iql_heeds_masks():
    algorithm = make("iql", CHOICES)
    batch = sample(algorithm, mask=torch.tensor([True, False, True]))
    assert (algorithm.logp(batch | {"action": torch.ones(2, 6, dtype=torch.long)}) < -1e30).all()


def test_iql_by_its_equations():
    algorithm = make("iql", gamma=0.9, expectile=0.8, beta=2.0, max_weight=0.4)
    with torch.no_grad():
        for p in algorithm.target.parameters():  # another network than the online one
            p += 0.3 * torch.randn(p.shape)
    raw, batch = sample(algorithm), algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        obs, action, value = raw["obs"][0], raw["action"][0], algorithm.value(raw["obs"])
        goal = raw["reward"][0] + 0.9 * torch.tensor([0.0, 1, 1, 1, 1, 1]) * value[1]
        u = algorithm.target(obs, action).min(0).values - value[0]
        expected = {
            "critic": 0.5 * (algorithm.critic(obs, action) - goal).square().sum(0),
            "value": (0.8 - (u < 0).float()).abs() * u**2,
            "actor": -torch.exp(2.0 * u).clamp(max=0.4) * algorithm.net.dist({"obs": obs}, {})[0].logp(action),
        }
        found = algorithm.forward(batch, IQL_PARTS)
    assert (found.metrics["weight"] == 0.4).any()
    assert (found.metrics["weight"] < 0.4).any()
    for key, term in expected.items():
        assert_close(found.terms[key], term)


# ---- TD3+BC ---------------------------------------------------------------------------------------------------------


def test_td3_bc_imitates_beside_the_value_of_the_policy_s_actions():
    algorithm = make("td3_bc", bc_alpha=2.5)
    batch = algorithm.prepare(sample(algorithm))
    algorithm.q_scale.fill_(4.0)
    with torch.no_grad():
        action, _ = algorithm.actor(batch["obs"], {}, None)
        value = algorithm.critic(batch["obs"], action)[0]
        expected = (action - batch["action"]).square().mean(-1) - 2.5 / 4.0 * value
        assert_close(algorithm.forward(batch, ("actor",)).terms["actor"], expected)


def test_values_are_measured_by_their_own_size():
    """By the mean of ``|Q|`` of the last update; without ``bc_alpha`` nothing is kept."""
    algorithm = make("td3_bc")
    batch = algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        expected = algorithm.critic(batch["obs"], batch["action"])[0].abs().mean()
    learner_of(algorithm).minimize(batch, algorithm)
    assert_close(algorithm.q_scale, expected)
    assert "q_scale" not in make("td3_bc", bc_alpha=None).state_dict()

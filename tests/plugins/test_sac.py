"""SAC beside its paper: gradients of the one graph, the target, the temperature."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlplug import testing, tree
from rlplug.plugins.algo.sac import SAC
from rlplug.types import ConfigError
from tests.plugins import acting
from tests.plugins.acting import gradients, learner_of
from tests.plugins.acting import windows as sample

SPEC = testing.spec(3, testing.box(2))
IMAGE = spaces.Box(0, 255, (3, 12, 12), np.uint8)
SMALL = ["model.image.filters=[[4, 3, 2]]", "model.image.hidden=[8]"]
KINDS = {
    "vector": (SPEC, []),
    "dict": (
        testing.spec(spaces.Dict({"a": IMAGE, "b": testing.box(2)}), testing.box(2)),
        ["model=multi_input", *SMALL],
    ),
    "discrete": (testing.spec(3, 4), []),
    "multi": (testing.spec(3, spaces.MultiDiscrete([3, 2])), []),
    "binary": (testing.spec(3, spaces.MultiBinary(3)), []),
    "lstm": (SPEC, ["model=lstm"]),
    "lstm discrete": (testing.spec(3, 4), ["model=lstm"]),
    "memory of the policy alone": (SPEC, ["model@critic_model=mlp", "model=gru"]),
}


def make(spec=SPEC, overrides=(), **changes) -> SAC:
    return acting.make(SAC, "sac", spec, overrides, **{"sequence_length": 4, "burn_in": 2, **changes})


def policy(algorithm: SAC, obs, mask: torch.Tensor | None = None):
    """The policy's distribution in every row, from an empty state."""
    return algorithm.policy(algorithm.model(obs, {}, None)[0], mask)


def test_target_is_the_paper_s():
    """1812.05905, equation 3, by hand: r + gamma (min Q'(s', a') - alpha log pi(a'|s')), cut at termination."""
    algorithm = make(gamma=0.9)
    batch = algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        features, _ = algorithm.model(batch["next_obs"], {}, None)
        dist = algorithm.policy(features)
        action = torch.tanh(dist.mean + dist.log_std.exp() * batch["next_noise"])
        q = algorithm.target(batch["next_obs"], action).min(0).values
        value = q - algorithm.log_alpha.exp() * dist.logp(action)
        goal = sample(algorithm)["reward"][0] + 0.9 * torch.tensor([0.0, 1, 1, 1, 1, 1]) * value
        expected = 0.5 * (algorithm.critic(batch["obs"], batch["action"]) - goal).square().sum(0)
    torch.testing.assert_close(algorithm.forward(batch, ("critic",)).terms["critic"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2,), (2, 1), ()])
def test_targets_of_a_beta_policy(shape):
    """As above, with the sample of a Beta distribution; the policy's loss moves both of its parameters."""
    spec = testing.spec(3, spaces.Box(-1.0, 1.0, shape, np.float32))
    algorithm = make(spec=spec, gamma=0.9, distribution="beta")
    rows = sample(algorithm)
    batch = algorithm.prepare(rows)
    losses = algorithm.forward(batch, ("critic", "actor"))
    with torch.no_grad():
        dist = policy(algorithm, batch["next_obs"])
        action = dist.sample(batch["next_noise"])
        q = algorithm.target(batch["next_obs"], action).min(0).values
        wide = torch.distributions.TransformedDistribution(
            torch.distributions.Beta(dist.alpha, dist.beta), torch.distributions.AffineTransform(-1.0, 2.0)
        )
        value = q - algorithm.log_alpha.exp() * wide.log_prob(action).sum(-1)
        goal = rows["reward"][0] + 0.9 * torch.tensor([0.0, 1, 1, 1, 1, 1]) * value
        expected = 0.5 * (algorithm.critic(batch["obs"], batch["action"]) - goal).square().sum(0)
    torch.testing.assert_close(losses.terms["critic"], expected, rtol=1e-4, atol=1e-5)
    losses.terms["actor"].sum().backward()
    assert (algorithm.policy.linear.weight.grad.abs().sum(1) > 0).all()
    out, _ = algorithm.act({"obs": batch["obs"], "is_first": torch.ones(6, dtype=torch.bool)}, {}, "explore")
    assert out["action"].shape == (6, *shape)
    assert (out["action"].abs() <= 1.0).all()


def test_a_beta_of_choices_is_refused():
    with pytest.raises(ConfigError, match=r"algo\.distribution: beta applies to continuous actions"):
        make(spec=testing.spec(3, 4), distribution="beta")


def test_temperature_rises_while_the_policy_is_more_certain_than_asked():
    algorithm = make(target_entropy=100.0)
    learner = learner_of(algorithm)
    learner.minimize(algorithm.prepare(sample(algorithm)), algorithm)
    assert algorithm.log_alpha > 0
    fixed = make(alpha_lr=None, initial_alpha=0.3, target_entropy=100.0)
    learner = learner_of(fixed)
    losses = learner.minimize(fixed.prepare(sample(fixed)), fixed)
    assert float(fixed.log_alpha) == pytest.approx(math.log(0.3))
    assert "alpha" not in losses.terms


# ---- discrete actions -----------------------------------------------------------------------------------------------


def soft_q_by_linear_solve(reward, step, going, pi, gamma, alpha):
    """``Q = r + gamma P sum_a' pi (Q - alpha log pi)`` solved as one linear system; tables ``[S, A]``."""
    states, actions = reward.shape
    system, right = torch.eye(states * actions), reward.clone().flatten()
    for s in range(states):
        for a in range(actions):
            if going[s, a]:
                for b in range(actions):
                    p = pi[step[s, a], b]
                    system[s * actions + a, step[s, a] * actions + b] -= gamma * p
                    right[s * actions + a] -= gamma * alpha * (p * p.log() if p > 0 else 0.0)
    return torch.linalg.solve(system, right).view(states, actions)


@pytest.mark.parametrize("masked", [False, True])
def test_critics_of_a_fixed_policy_converge_to_its_soft_q(masked):
    """1910.07207, equations 2, 3 and 10, on a small MDP: learned by gradients, and solved as a linear system."""
    states, actions, alpha = 3, 3, 0.5
    spec = testing.spec(spaces.Discrete(states), actions)
    algorithm = make(
        spec=spec, overrides=["model=mlp", "model.hidden=[]"], gamma=0.8, tau=0.5, critic_lr=0.05, initial_alpha=alpha
    )
    g = torch.Generator().manual_seed(3)
    reward = torch.randn(states, actions, generator=g)
    step = torch.randint(states, (states, actions), generator=g)
    going = torch.ones(states, actions, dtype=torch.bool)
    going[0, 1] = False
    mask = torch.ones(states, actions, dtype=torch.bool)
    if masked:
        mask[1, 2] = mask[2, 0] = False
    with torch.no_grad():
        algorithm.policy.linear.weight.copy_(torch.randn(actions, states, generator=g))
        logits = algorithm.policy.linear.weight.T + algorithm.policy.linear.bias
        pi = torch.where(mask, logits, -torch.inf).softmax(-1)
    s, a = (x.flatten() for x in torch.meshgrid(torch.arange(states), torch.arange(actions), indexing="ij"))
    rows = lambda first, second: torch.stack((first, second))  # noqa: E731
    batch = algorithm.prepare(
        {
            "obs": rows(s, step[s, a]),
            "action": rows(a, a),
            "reward": rows(reward[s, a], reward[s, a]),
            "terminated": rows(~going[s, a], ~going[s, a]),
            "valid": torch.ones(2, len(s), dtype=torch.bool),
            "action_mask": rows(mask[s], mask[step[s, a]]),
        }
    )
    learner = learner_of(algorithm)
    for _ in range(600):
        learner.minimize(batch, algorithm, ("critic",))
    with torch.no_grad():
        learned = algorithm.critic(algorithm.critic.encode(torch.arange(states), {}, None)[0])
    expected = soft_q_by_linear_solve(reward, step, going, pi, 0.8, alpha)
    for q in learned.squeeze(-2):
        torch.testing.assert_close(q, expected, rtol=0, atol=5e-3)


def test_one_factor_is_a_discrete_action():
    """The same weights and data give the same losses, as Discrete(2), as MultiDiscrete([2]) and as MultiBinary(1)."""
    terms = []
    for action in (spaces.Discrete(2), spaces.MultiDiscrete([2]), spaces.MultiBinary(1)):
        algorithm = make(spec=testing.spec(3, action))
        batch = sample(make(spec=testing.spec(3, 2)))
        batch["action"] = batch["action"].view(*batch["action"].shape, *algorithm.shape)
        terms.append(algorithm.forward(algorithm.prepare(batch), ("critic", "actor", "alpha")).terms)
    for other in terms[1:]:
        for key in ("critic", "actor", "alpha"):
            assert torch.equal(terms[0][key], other[key])


def test_the_value_of_several_factors_is_the_mean_over_all_joint_actions():
    sizes = [3, 2]
    algorithm = make(spec=testing.spec(3, spaces.MultiDiscrete(sizes)), initial_alpha=0.7)
    batch = algorithm.prepare(sample(algorithm))
    losses = algorithm.forward(batch, ("critic", "actor", "alpha"))
    with torch.no_grad():
        log_pi = policy(algorithm, batch["obs"]).log_probs  # [B, 2, 3]
        q = algorithm.critic(algorithm.critic.encode(batch["obs"], {}, None)[0])  # [2, B, 2, 3]
        value, logp = torch.zeros(6), torch.zeros(6)
        for joint in itertools.product(*map(range, sizes)):
            log_joint = sum(log_pi[:, f, a] for f, a in enumerate(joint))
            q_joint = sum(q.amin(0)[:, f, a] for f, a in enumerate(joint))
            value += log_joint.exp() * (q_joint - 0.7 * log_joint)
            logp += log_joint.exp() * log_joint
        taken = torch.stack([q[:, b, 0, i] + q[:, b, 1, j] for b, (i, j) in enumerate(batch["action"])], -1)
    torch.testing.assert_close(losses.terms["actor"], -value)
    torch.testing.assert_close(losses.metrics["logp"], logp)
    torch.testing.assert_close(losses.metrics["q"], taken[0])
    goal = 0.5 * math.log(3 * 2)
    torch.testing.assert_close(losses.terms["alpha"], -algorithm.log_alpha.detach() * (logp + goal))


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], ["model=lstm"]])
def test_forbidden_actions_count_neither_in_targets_nor_in_the_policy(overrides):
    mask = torch.tensor([True, False, True, True])
    algorithm = make(spec=testing.spec(3, 4), overrides=overrides, n_step=2)
    batch = sample(algorithm, mask=mask)
    batch["action"] = torch.where(batch["action"] == 1, 0, batch["action"])
    batch = algorithm.prepare(batch)
    before = algorithm.forward(batch, ("critic", "actor", "alpha")).terms
    with torch.no_grad():
        for critic in (algorithm.critic, algorithm.target):
            critic.head.bias[..., 1] += 1e6
    after = algorithm.forward(batch, ("critic", "actor", "alpha")).terms
    for key in ("critic", "actor", "alpha"):
        torch.testing.assert_close(after[key], before[key])
    found = gradients(algorithm, batch, ("actor",))["policy.linear.weight"]
    assert (found[1] == 0).all()
    assert (found[[0, 2, 3]] != 0).any(-1).all()
    dist = policy(algorithm, torch.randn(5, 3), mask.expand(5, 4))
    torch.testing.assert_close(algorithm.target_entropy(dist), torch.full((5,), 0.5 * math.log(3)))


# ---- recurrence -----------------------------------------------------------------------------------------------------


def one_by_one(torso, batch, column: int, carry):
    """Features of every row of a column, the state emptied by hand where an episode begins."""
    out = []
    for obs, first in zip(batch["obs"][:, column], batch["is_first"][:, column], strict=True):
        if first:
            carry = {}
        features, carry = torso(obs[None], carry, torch.zeros(1, dtype=torch.bool))
        out.append(features)
    return out


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("action", [testing.box(2), spaces.Discrete(4)], ids=["continuous", "discrete"])
def test_one_unroll_is_every_row_by_itself(action, burn_in):
    """The critics' loss of every row, from the definitions: one row after the other, one target at a time."""
    n, gamma = 2, 0.9
    spec = testing.spec(3, action)
    algorithm = make(spec=spec, overrides=["model=lstm"], n_step=n, gamma=gamma, burn_in=burn_in, initial_alpha=0.3)
    raw = sample(algorithm)
    batch = algorithm.prepare(raw)
    losses = algorithm.forward(batch, ("critic", "actor", "alpha"))
    assert batch["valid"].shape == losses.terms["critic"].shape == (4, 6)
    with torch.no_grad():
        for b in range(6):
            state = tree.map(lambda x: x[0, b : b + 1], raw["carry"])  # noqa: B023
            dist = [algorithm.policy(x) for x in one_by_one(algorithm.model, raw, b, state)]
            codes = one_by_one(algorithm.critic.torso, raw, b, {})
            target_codes = one_by_one(algorithm.target.torso, raw, b, {})
            for row in range(burn_in, burn_in + 4):
                if not raw["valid"][row, b]:
                    continue
                goal, at = 0.0, row
                for i in range(n):
                    goal, at, ended = goal + gamma**i * raw["reward"][at, b], at + 1, raw["terminated"][at, b]
                    if ended or not raw["valid"][at, b]:
                        break
                noise = batch["next_noise"][row - burn_in, b][None] if "next_noise" in batch else None
                alpha = torch.tensor(0.3)
                value, _ = algorithm.soft_value(algorithm.target, target_codes[at], dist[at], noise, alpha)
                if not ended:
                    goal = goal + gamma ** (at - row) * value[0]
                taken = raw["action"][row, b].view(1, -1)
                error = algorithm.critic(codes[row], taken)[:, 0] - goal
                expected = 0.5 * error.square().sum()
                torch.testing.assert_close(losses.terms["critic"][row - burn_in, b], expected, rtol=1e-4, atol=1e-5)
                noise = batch["noise"][row - burn_in, b][None] if "noise" in batch else None
                value, _ = algorithm.soft_value(algorithm.critic, codes[row], dist[row], noise, alpha)
                torch.testing.assert_close(losses.terms["actor"][row - burn_in, b], -value[0], rtol=1e-4, atol=1e-5)


def test_the_burn_in_warms_up_without_gradient():
    algorithm = make(overrides=["model=lstm"], burn_in=3)
    batch = algorithm.prepare(sample(algorithm))
    batch["is_first"].zero_()
    before = algorithm.forward(batch, ("critic", "actor")).terms
    batch["obs"][1] += 1.0
    batch["obs"].requires_grad_()
    after = algorithm.forward(batch, ("critic", "actor")).terms
    for key in ("critic", "actor"):
        assert (before[key] != after[key]).any()
    sum(term.mean() for term in after.values()).backward()
    assert (batch["obs"].grad[:3] == 0).all()
    assert (batch["obs"].grad[3:-1] != 0).any(-1).all()


def judged(kind: str) -> tuple[SAC, dict]:
    """An algorithm, and a segment with actions that it took, each row from the state that is stored with it."""
    spec, overrides = KINDS[kind]
    algorithm = make(spec=spec, overrides=overrides)
    batch = sample(algorithm)
    batch.setdefault("is_first", torch.zeros(batch["valid"].shape, dtype=torch.bool))
    if "carry" in batch:
        batch["carry"] = tree.map(lambda x: x[:1].clone(), batch["carry"])
    carry, actions = tree.map(lambda x: x[0], batch.get("carry", {})), []
    for t in range(len(batch["valid"])):
        row = tree.map(lambda x, t=t: x[t], {key: batch[key] for key in ("obs", "is_first")})
        with torch.no_grad():
            out, carry = algorithm.act(row, carry, "explore")
        actions.append(out["action"])
    return algorithm, batch | {"action": torch.stack(actions)}


def heads(algorithm: SAC, batch) -> list:
    """The policy's distribution of every row, computed row by row."""
    carry, out = tree.map(lambda x: x[0], batch.get("carry", {})), []
    for t in range(len(batch["valid"])):
        features, carry = algorithm.model(tree.map(lambda x, t=t: x[t], batch["obs"]), carry, batch["is_first"][t])
        out.append(algorithm.policy(features))
    return out


@pytest.mark.parametrize("kind", ["vector", "lstm", "memory of the policy alone", "dict"])
def test_the_density_of_a_stored_action_is_that_of_a_squashed_normal(kind):
    algorithm, batch = judged(kind)
    logp = algorithm.logp(batch)
    assert logp.shape == batch["valid"].shape
    for t, dist in enumerate(heads(algorithm, batch)):
        normal = torch.distributions.Normal(dist.mean.double(), dist.log_std.double().exp())
        squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
        torch.testing.assert_close(
            logp[t].double(), squashed.log_prob(batch["action"][t].double()).sum(-1), atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("kind", ["discrete", "multi", "binary", "lstm discrete"])
def test_the_probability_of_a_stored_choice(kind):
    algorithm, batch = judged(kind)
    logp = algorithm.logp(batch)
    for t, dist in enumerate(heads(algorithm, batch)):
        action = batch["action"][t].reshape(len(logp[t]), -1)
        each = [torch.distributions.Categorical(logits=dist.log_probs[:, i]) for i in range(action.shape[1])]
        torch.testing.assert_close(logp[t], sum(one.log_prob(action[:, i]) for i, one in enumerate(each)))


@pytest.mark.parametrize("kind", ["vector", "lstm"])
def test_the_value_is_the_mean_over_the_actions_of_the_policy(kind):
    algorithm, batch = judged(kind)
    drawn = torch.get_rng_state()
    with torch.no_grad():
        value = algorithm.values(batch)
        assert torch.equal(value, algorithm.values(batch))
        assert torch.equal(drawn, torch.get_rng_state())
        assert value.shape == batch["valid"].shape
        code, _ = algorithm.critic.encode(batch["obs"], {}, batch["is_first"])
        total, n = torch.zeros_like(value), 2000
        dists = heads(algorithm, batch)
        for _ in range(n):
            pairs = [dist.sample_and_logp(torch.randn_like(dist.mean)) for dist in dists]
            action, logp = (torch.stack(x) for x in zip(*pairs, strict=True))
            total += algorithm.critic(code, action).amin(0) - algorithm.log_alpha.exp() * logp
    error = (value - total / n).abs()
    assert error.mean() < 0.1 < value.std() + logp.std()


def test_the_value_of_choices_is_exact():
    algorithm, batch = judged("lstm discrete")
    value = algorithm.values(batch)
    code, _ = algorithm.critic.encode(batch["obs"], {}, batch["is_first"])
    q = algorithm.critic(code).amin(0).squeeze(-2)
    for t, dist in enumerate(heads(algorithm, batch)):
        p = dist.log_probs.squeeze(-2).exp()
        torch.testing.assert_close(value[t], (p * (q[t] - algorithm.log_alpha.exp() * p.log())).sum(-1))

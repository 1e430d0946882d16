"""SAC beside its paper: gradients of the one graph, the target, the temperature."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

from rlplug import testing
from rlplug.api import Losses
from rlplug.plugins.algo.sac import SAC
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.ranks import one_rank
from rlplug.types import ConfigError

SPEC = testing.spec(3, testing.box(2))


def make(seed: int = 0, spec=SPEC, **changes) -> SAC:
    torch.manual_seed(seed)
    cfg = testing.config("algo/sac", **changes)
    return SAC(cfg, testing.context(spec, overrides=["algo=sac"], needs=SAC.needs(cfg, spec), seed=seed))


def sample(algorithm: SAC, n: int = 6):
    g = torch.Generator().manual_seed(1)
    rows = algorithm.cfg.n_step + 1
    shape = algorithm.ctx.spec.sole.action.shape
    batch = {"obs": torch.randn(rows, n, 3, generator=g), "reward": torch.randn(rows, n, generator=g)}
    batch["action"] = torch.rand(rows, n, *shape, generator=g) * 2 - 1
    batch["terminated"] = torch.zeros(rows, n, dtype=torch.bool)
    batch["terminated"][0, 0] = True
    return batch | {"valid": torch.ones(rows, n, dtype=torch.bool)}


def gradients(algorithm: SAC, batch, parts) -> dict[str, torch.Tensor]:
    algorithm.zero_grad()
    sum(term.mean() for term in algorithm.forward(batch, parts).terms.values()).backward()
    return {name: p.grad.clone() for name, p in algorithm.named_parameters() if p.grad is not None}


def test_one_graph_gives_the_gradients_of_three_losses_computed_one_by_one():
    algorithm = make()
    batch = algorithm.prepare(sample(algorithm))
    together = gradients(algorithm, batch, ("critic", "actor", "alpha"))
    apart = [gradients(algorithm, batch, (part,)) for part in ("critic", "actor", "alpha")]
    assert {frozenset(name.split(".")[0] for name in one) for one in apart} == {
        frozenset({"critic"}),
        frozenset({"model", "policy"}),
        frozenset({"log_alpha"}),
    }
    merged = {name: grad for one in apart for name, grad in one.items()}
    assert merged.keys() == together.keys()
    for name, grad in merged.items():
        torch.testing.assert_close(together[name], grad, rtol=1e-5, atol=1e-7)


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


def test_temperature_rises_while_the_policy_is_more_certain_than_asked():
    algorithm = make(target_entropy=100.0)
    learner = FabricLearner(one_rank(), algorithm.ctx, algorithm, None)
    learner.minimise(algorithm.prepare(sample(algorithm)), algorithm)
    assert algorithm.log_alpha > 0
    fixed = make(alpha_lr=None, initial_alpha=0.3, target_entropy=100.0)
    learner = FabricLearner(one_rank(), fixed.ctx, fixed, None)
    losses = learner.minimise(fixed.prepare(sample(fixed)), fixed)
    assert float(fixed.log_alpha) == pytest.approx(math.log(0.3))
    assert "alpha" not in losses.terms


def test_target_network_follows_at_its_frequency():
    algorithm = make(target_network_update_freq=2, tau=1.0)
    learner = FabricLearner(one_rank(), algorithm.ctx, algorithm, None)
    before = [p.clone() for p in algorithm.target.parameters()]
    learner.minimise(algorithm.prepare(sample(algorithm)), algorithm)
    assert all(torch.equal(a, b) for a, b in zip(before, algorithm.target.parameters(), strict=True))
    learner.minimise(algorithm.prepare(sample(algorithm)), algorithm)
    pairs = zip(algorithm.critic.parameters(), algorithm.target.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("changes", [{"twin_q": False}, {"n_step": 3}, {"grad_clip": 0.5, "grad_clip_by": "norm"}])
def test_every_switch_learns_a_step(changes):
    algorithm = make(**changes)
    learner = FabricLearner(one_rank(), algorithm.ctx, algorithm, None)
    losses = learner.minimise(algorithm.prepare(sample(algorithm)), algorithm)
    assert isinstance(losses, Losses)
    assert all(torch.isfinite(term) for term in losses.terms.values())
    q = algorithm.critic(torch.zeros(5, 3), torch.zeros(5, 2))
    assert q.shape == (1 if changes.get("twin_q") is False else 2, 5)


def test_actions_of_any_shape():
    spec = testing.spec(3, spaces.Box(-1.0, 1.0, (2, 2)))
    algorithm = make(spec=spec)
    step = {"obs": torch.zeros(4, 3), "is_first": torch.ones(4, dtype=torch.bool)}
    for mode in ("explore", "greedy", "random"):
        out, _ = algorithm.act(step, {}, mode)
        assert out["action"].shape == (4, 2, 2)
        assert out["action"].abs().max() <= 1
    FabricLearner(one_rank(), algorithm.ctx, algorithm, None).minimise(algorithm.prepare(sample(algorithm)), algorithm)


def test_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match="continuous"):
        make(spec=testing.spec(3, 2))

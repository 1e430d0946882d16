"""Behavioral cloning and MARWIL beside their equations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlplug import testing
from rlplug.config import compose
from rlplug.functional.imitation import advantage_weight, log_likelihood
from rlplug.nn import Categorical, DiagGaussian
from rlplug.plugins.algo.marwil import BC, MARWIL
from rlplug.run.build import build
from tests.plugins import acting
from tests.plugins.acting import learner_of

SMALL = Path(testing.__file__).parent / "cartpole.npz"
ALGORITHMS = {"bc": BC, "marwil": MARWIL}


def make(name, overrides=(), **changes):
    return acting.make(ALGORITHMS[name], name, None, overrides or ["model.hidden=[8]"], **changes)


def episodes(lengths=(3, 2), terminated=(True, False)):
    """Side by side, rewards 1, 2, 3 ...; a shorter one repeats its final row."""
    n, b = max(lengths) + 1, len(lengths)
    valid = torch.arange(n)[:, None] < torch.tensor(lengths)
    over = torch.arange(n)[:, None] == torch.tensor(lengths) - 1
    ends = torch.tensor(terminated)
    g = torch.Generator().manual_seed(0)
    return {
        "obs": torch.randn(n, b, 3, generator=g),
        "action": torch.randint(0, 2, (n, b), generator=g),
        "reward": torch.where(valid, torch.arange(1.0, n + 1)[:, None], torch.nan),
        "terminated": over & ends,
        "truncated": over & ~ends,
        "is_first": (torch.arange(n) == 0)[:, None].expand(n, b),
        "valid": valid,
    }


def constant(algorithm: MARWIL, value: float) -> MARWIL:
    """Its values are all the same, and its policy is uniform."""
    with torch.no_grad():
        for layer in (algorithm.value, algorithm.net.policy.linear):
            layer.weight.zero_()
            layer.bias.zero_()
        algorithm.value.bias.fill_(value)
    return algorithm


# ---- functions ------------------------------------------------------------------------------------------------------


def test_the_weight_of_an_advantage():
    """Advantages of +-1 where the mean of their squares is 100."""
    weights = advantage_weight(torch.tensor([1.0, -1.0, 0.0]), torch.tensor(100.0), 1.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.1), math.exp(-0.1), 1.0]))
    doubled = advantage_weight(torch.tensor([1.0]), torch.tensor(100.0), 2.0)
    torch.testing.assert_close(doubled, torch.tensor([math.exp(0.2)]))


def test_the_weight_has_a_limit():
    """An advantage of 1000 where the mean of squares is 1: its exponential is no number of single precision."""
    advantages, norm = torch.tensor([1000.0, 1.0]), torch.tensor(1.0)
    torch.testing.assert_close(advantage_weight(advantages, norm, 1.0, 20.0), torch.tensor([20.0, math.e]))
    assert advantage_weight(advantages, norm, 1.0)[0] == math.inf


def test_wider_gaussians_are_worth_something():
    dist = DiagGaussian(torch.zeros(2, 2), torch.tensor([0.5, -0.1]), (2,))
    action = torch.ones(2, 2)
    torch.testing.assert_close(log_likelihood(dist, action, 0.3), dist.logp(action) + 0.3 * 0.2)
    choice = Categorical(torch.zeros(2, 2))
    torch.testing.assert_close(log_likelihood(choice, torch.tensor([0, 1]), 0.3), torch.full((2,), -math.log(2)))


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_cloning_maximizes_the_likelihood():
    algorithm, batch = make("bc"), episodes()
    rows = {key: batch[key][:3].flatten(0, 1)[[0, 2, 4]] for key in ("obs", "action")}
    losses = algorithm.forward(rows, ("policy",))
    torch.testing.assert_close(losses.terms["policy"], -algorithm.logp(batch)[:3].flatten()[[0, 2, 4]])
    assert losses.terms.keys() == {"policy"}


def test_returns_go_on_with_a_value_where_an_episode_was_truncated():
    """1 + .5 2 + .25 3 where it terminated; 1 + .5 2 + .25 10 where the final observation is worth 10."""
    algorithm = constant(make("marwil", gamma=0.5), 10.0)
    prepared = algorithm.prepare(episodes())
    torch.testing.assert_close(prepared["returns"][:3, 0], torch.tensor([2.75, 3.5, 3.0]))
    torch.testing.assert_close(prepared["returns"][:2, 1], torch.tensor([4.5, 7.0]))


def test_marwil_weights_actions_by_their_advantages():
    algorithm = constant(make("marwil", gamma=0.5, beta=2.0, vf_coeff=0.3), 3.0)
    prepared = algorithm.prepare(episodes((3, 3), (True, True)))
    losses = algorithm.forward(prepared, ("policy",))
    advantage = torch.tensor([2.75, 3.5, 3.0]) - 3.0
    torch.testing.assert_close(losses.terms["policy"][:3, 0], torch.exp(0.2 * advantage) * math.log(2))
    torch.testing.assert_close(losses.terms["value"][:3, 0], 0.15 * advantage.square())
    torch.testing.assert_close(losses.metrics["sqd_advantage"][:3, 0], advantage.square())
    losses.terms["policy"][:3].sum().backward()
    assert all(p.grad is None for p in (*algorithm.value.parameters(), *algorithm.value_torso.parameters()))


def test_the_mean_of_squared_advantages_follows_them():
    changes = {"moving_average_sqd_adv_norm_start": 50.0, "moving_average_sqd_adv_norm_update_rate": 0.1}
    algorithm = constant(make("marwil", gamma=0.5, lr=0.0, **changes), 3.0)
    with torch.no_grad():
        prepared = algorithm.prepare(episodes((3,), (True,)))
    learner_of(algorithm).minimize(prepared, algorithm)
    mean = float((torch.tensor([2.75, 3.5, 3.0]) - 3.0).square().mean())
    torch.testing.assert_close(algorithm.sqd_adv_norm, torch.tensor(0.9 * 50.0 + 0.1 * mean))


def test_a_rate_of_nothing_leaves_it():
    algorithm = make("marwil")
    with torch.no_grad():
        prepared = algorithm.prepare(episodes())
    learner_of(algorithm).minimize(prepared, algorithm)
    assert float(algorithm.sqd_adv_norm) == pytest.approx(100.0, abs=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recurrent_model_is_unrolled_from_the_beginning(name):
    """As it acts: row by row, from its initial state."""
    algorithm, batch = make(name, overrides=["model.hidden=8", "model=lstm"]), episodes()
    losses, carry = algorithm.forward(algorithm.prepare(batch), ("policy",)), algorithm.initial_carry(2)
    for t in range(3):
        step = {"obs": batch["obs"][t], "is_first": batch["is_first"][t]}
        dist, carry = algorithm.net.dist(step, carry)
        if name == "bc":
            torch.testing.assert_close(losses.terms["policy"][t], -dist.logp(batch["action"][t]))
        torch.testing.assert_close(algorithm.logp(batch)[t], dist.logp(batch["action"][t]))


# ---- runs -----------------------------------------------------------------------------------------------------------

WORDS = (
    *("env=cartpole", "hardware=cpu", "logger=[]", "tuned=none", "model.hidden=[8]", "eval.every=0", "eval.episodes=2"),
    *(f"data.path={SMALL}", "total_steps=8", "train_batch_size=3", "algo.sgd_minibatch_size=16"),
)


def test_without_advantages_it_is_cloning_bit_for_bit(tmp_path):
    found = {}
    for name, more in {"bc": (), "marwil": ("algo.beta=0",)}.items():
        trainer = build(compose([f"algo={name}", *WORDS, *more]), Path())
        trainer.reports.report = lambda trainer: None
        trainer.loop.run(trainer)
        found[name] = trainer.algorithm.net.state_dict()
        trainer.close()
    assert found["bc"].keys() == found["marwil"].keys()
    assert all(torch.equal(x, found["marwil"][key]) for key, x in found["bc"].items())
    start = build(compose(["algo=bc", *WORDS]), Path())
    assert not torch.equal(found["bc"]["policy.linear.weight"], start.algorithm.net.policy.linear.weight)
    start.close()

"""The terms of learning from recorded actions, by hand and by integrals that are known."""

from __future__ import annotations

import math

import pytest
import torch

from rlplug.functional.offline import expectile_loss, log_sum_exp, sampled_log_sum_exp

FLOOR = torch.finfo(torch.float32).min


def test_conservative_term_of_three_actions():
    q = torch.tensor([1.0, 2.0, 3.0])
    assert log_sum_exp(q) - q[0] == pytest.approx(2.407606, abs=1e-6)
    torch.testing.assert_close(log_sum_exp(q.expand(4, 3).T, dim=0), torch.full((4,), 3.407606))


def test_temperature_leads_from_the_maximum_to_the_mean():
    q = torch.tensor([1.0, 2.0, 3.0])
    assert log_sum_exp(q, 0.01) == pytest.approx(3.0)
    assert log_sum_exp(q, 1e3) - 1e3 * math.log(3) == pytest.approx(2.0, abs=1e-2)
    assert log_sum_exp(q, 2.0) == pytest.approx(2 * math.log(math.exp(0.5) + math.e + math.exp(1.5)))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_forbidden_actions_do_not_count(temperature):
    q = torch.tensor([1.0, FLOOR, 3.0], requires_grad=True)
    total = log_sum_exp(q, temperature)
    assert total.item() == pytest.approx(temperature * math.log(sum(math.exp(x / temperature) for x in (1, 3))))
    (grad,) = torch.autograd.grad(total, q)
    assert grad[1] == 0
    assert grad.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_of_any_distribution_estimate_one_integral(temperature):
    """Of ``exp(3 a / T)`` over [-1, 1]: uniform actions, actions of density (1 + a) / 2, and both in one estimate."""
    u = (torch.arange(2000) + 0.5) / 2000
    uniform, rising = 2 * u - 1, 2 * u.sqrt() - 1
    densities = torch.full_like(uniform, 0.5), (1 + rising) / 2
    scale = 3.0 / temperature
    exact = temperature * math.log((math.exp(scale) - math.exp(-scale)) / scale)

    def estimate(actions, density):
        return sampled_log_sum_exp(3.0 * actions[None, :, None], density.log()[:, None], temperature)

    for actions, density in zip((uniform, rising), densities, strict=True):
        assert estimate(actions, density).item() == pytest.approx(exact, abs=1e-2)
    assert estimate(torch.cat((uniform, rising)), torch.cat(densities)).item() == pytest.approx(exact, abs=1e-2)


def test_a_constant_is_integrated_exactly_by_one_action():
    """Over [-1, 1]^2 the integral of exp(5) is 4 exp(5)."""
    out = sampled_log_sum_exp(torch.full((2, 1, 3), 5.0), torch.full((1, 3), -2 * math.log(2.0)))
    torch.testing.assert_close(out, torch.full((2, 3), 5.0 + math.log(4.0)))


def test_expectile_loss_by_hand():
    error = torch.tensor([2.0, -2.0, 0.0])
    torch.testing.assert_close(expectile_loss(error, 0.7), torch.tensor([2.8, 1.2, 0.0]))
    torch.testing.assert_close(expectile_loss(error, 0.5), 0.5 * error.square())


@pytest.mark.parametrize("expectile", [0.3, 0.5, 0.9])
def test_the_expectile_of_zero_and_one_is_tau(expectile):
    estimate = torch.linspace(0, 1, 101)
    loss = expectile_loss(torch.tensor([[0.0], [1.0]]) - estimate, expectile).sum(0)
    assert estimate[loss.argmin()] == pytest.approx(expectile)

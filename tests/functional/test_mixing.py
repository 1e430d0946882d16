"""Mixing of values, team rewards, and whose values count."""

import torch
from torch.testing import assert_close

from rlplug.functional.mixing import monotonic, present, team_reward


def test_the_weights_are_positive_and_the_biases_are_not():
    q, w1 = torch.tensor([2.0, -1.0]), torch.tensor([[1.0, -0.5], [2.0, 0.0]])
    # hidden: elu([2 * 1 - 1 * 2 + 0.5, 2 * 0.5 - 0 - 3]) = [0.5, exp(-2) - 1]
    expected = 3.0 * 0.5 + 4.0 * (torch.exp(torch.tensor(-2.0)) - 1.0) - 7.0
    total = monotonic(q, w1, torch.tensor([0.5, -3.0]), torch.tensor([-3.0, 4.0]), torch.tensor(-7.0))
    assert_close(total, expected)


def test_the_value_of_the_team_never_falls_when_that_of_an_agent_rises():
    g = torch.Generator().manual_seed(0)
    q = (5.0 * torch.randn(200, 4, generator=g)).requires_grad_()
    weights = [3.0 * torch.randn(200, *shape, generator=g) for shape in ((4, 6), (6,), (6,), ())]
    (slope,) = torch.autograd.grad(monotonic(q, *weights).sum(), q)
    assert (slope >= 0.0).all()
    assert (slope > 0.0).any(0).all()


def test_agents_that_are_not_alive_are_paid_nothing():
    reward = torch.tensor([[3.0, torch.nan, 6.0], [1.0, 1.0, 1.0]])
    alive = torch.tensor([[True, False, True], [True, True, True]])
    assert team_reward(reward, alive).tolist() == [3.0, 1.0]


def test_a_truncated_agent_counts_in_its_final_row_and_a_terminated_one_does_not():
    #        stays, terminates at row 0, is truncated at row 0, joins at row 2, ends with the last row
    alive = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 1], [1, 0, 0, 1, 0]]).bool()[:, None]
    terminated = torch.tensor([[0, 1, 0, 0, 0], [0, 1, 0, 0, 1], [1, 1, 0, 0, 1]]).bool()[:, None]
    found = present(alive, terminated).squeeze(1).int().tolist()
    assert found == [[1, 1, 1, 0, 1], [1, 0, 1, 0, 1], [1, 0, 0, 1, 0]]

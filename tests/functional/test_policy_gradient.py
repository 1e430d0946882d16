import pytest
import torch
from torch.testing import assert_close

from rlplug.functional import adapt_kl_coeff, clipped_surrogate, clipped_value_loss


@pytest.mark.parametrize("clip", [0.2, torch.tensor(0.2)])
def test_clipped_surrogate_by_hand(clip):
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0])
    assert_close(clipped_surrogate(ratio, advantage, clip), torch.tensor([1.2, -0.8, -1.5, 0.5, 2.2]))


@pytest.mark.parametrize("clip", [0.2, torch.tensor(0.2)])
def test_clipped_surrogate_moves_no_ratio_that_has_gone_far_enough(clip):
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 3.0])
    clipped_surrogate(ratio, advantage, clip).sum().backward()
    assert_close(ratio.grad, torch.tensor([0.0, 0.0, -1.0, 1.0, 3.0]))


def test_clipped_value_loss_by_hand():
    old, ret = torch.zeros(4), torch.tensor([2.0, 2.0, -2.0, 0.0])
    value = torch.tensor([1.0, 0.3, -1.0, 1.0], requires_grad=True)
    loss = clipped_value_loss(value, old, ret, 0.5)
    assert_close(loss, torch.tensor([2.25, 2.89, 2.25, 1.0]))
    loss.sum().backward()
    assert_close(value.grad, torch.tensor([0.0, -3.4, 0.0, 2.0]))
    assert_close(clipped_value_loss(value, old, ret, None), torch.tensor([1.0, 2.89, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.021, 0.3), (0.02, 0.2), (0.01, 0.2), (0.005, 0.2), (0.0049, 0.1), (0.0, 0.1)]
)
def test_kl_rule(kl, expected):
    coeff = adapt_kl_coeff(torch.tensor(0.2, dtype=torch.float64), torch.tensor(kl, dtype=torch.float64), 0.01)
    assert coeff.item() == pytest.approx(expected)

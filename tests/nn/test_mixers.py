"""Mixers: monotone, the sum, and none."""

import pytest
import torch
from torch.testing import assert_close

from rlplug.nn import Linear, MonotonicMixer, mixer_for


def drawn(*shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("hiddens", [(), (7,)])
def test_the_hypernetworks_mixer_is_monotone_in_every_state(hiddens):
    torch.manual_seed(1)
    mixer = mixer_for("qmix", 3, 5, 8, hiddens)
    q = drawn(50, 4, 3).requires_grad_()
    total = mixer(q, drawn(50, 4, 5))
    assert total.shape == (50, 4)
    (slope,) = torch.autograd.grad(total.sum(), q)
    assert (slope >= 0.0).all()
    assert len(slope.unique()) > 500  # it depends on the state


def test_its_weights_come_from_the_state_and_only_biases_may_be_negative():
    mixer, q = MonotonicMixer(2, 3, 2), torch.tensor([[2.0, -1.0]])
    for net, out in (
        (mixer.w1, [1.0, -0.5, 2.0, 0.0]),
        (mixer.b1, [0.5, -3.0]),
        (mixer.w2, [-3.0, 4.0]),
        (mixer.b2, [-7.0]),
    ):
        last = net if isinstance(net, Linear) else net[-1]
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor(out))
    # hidden: elu([2 * 1 - 1 * 2 + 0.5, 2 * 0.5 - 0 - 3]) = [0.5, exp(-2) - 1]
    expected = 3.0 * 0.5 + 4.0 * (torch.exp(torch.tensor(-2.0)) - 1.0) - 7.0
    assert_close(mixer(q, drawn(1, 3)), expected[None])
    assert sum(p.numel() for p in mixer.b2.parameters()) == 3 * 2 + 2 + 2 + 1  # a hidden layer, and one number


def test_vdn_is_the_sum_and_none_keeps_agents_apart():
    q = drawn(5, 3)
    assert_close(mixer_for("vdn", 3, 1, 1)(q, None), q[:, 0] + q[:, 1] + q[:, 2])
    assert mixer_for("none", 3, 1, 1)(q, None) is q
    assert not [*mixer_for("vdn", 3, 1, 1).parameters()]

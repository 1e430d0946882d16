"""Mixers: monotone, the sum, and none."""

import pytest
import torch
from torch.testing import assert_close

from rlplug.functional.mixing import monotonic
from rlplug.nn import MonotonicMixer, mixer_for


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


def test_its_weights_come_from_the_state():
    torch.manual_seed(1)
    mixer, state, q = MonotonicMixer(2, 3, 4), drawn(6, 3), drawn(6, 2)
    layers = [mixer.w1(state).view(6, 2, 4), mixer.b1(state), mixer.w2(state), mixer.b2(state)[:, 0]]
    assert_close(mixer(q, state), monotonic(q, *layers))
    assert sum(p.numel() for p in mixer.b2.parameters()) == 3 * 4 + 4 + 4 + 1  # a hidden layer, and one number


def test_vdn_is_the_sum_and_none_keeps_agents_apart():
    q = drawn(5, 3)
    assert_close(mixer_for("vdn", 3, 1, 1)(q, None), q[:, 0] + q[:, 1] + q[:, 2])
    assert mixer_for("none", 3, 1, 1)(q, None) is q
    assert not [*mixer_for("vdn", 3, 1, 1).parameters()]

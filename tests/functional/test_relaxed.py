"""Relaxed samples of categorical distributions."""

import torch
from torch.testing import assert_close

from rlplug.functional.relaxed import gumbel, one_hot_max, relaxed_one_hot


def test_perturbed_logits_are_exact_samples():
    logits = torch.tensor([0.0, 1.0, -1.0]).expand(200_000, 3)
    noise = gumbel(torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0)))
    assert_close(one_hot_max(logits + noise).mean(0), logits[0].softmax(-1), atol=5e-3, rtol=0.0)
    assert gumbel(torch.tensor([0.0, 1.0 - 2**-24])).isfinite().all()


def test_the_straight_through_sample_is_one_hot_and_has_the_relaxed_gradient():
    logits = torch.tensor([[0.3, -0.2, 0.9]], requires_grad=True)
    weight = torch.tensor([1.0, -2.0, 3.0])
    soft, hard = (relaxed_one_hot(logits, 0.5, straight) for straight in (False, True))
    assert_close(soft, (logits / 0.5).softmax(-1))
    assert_close(hard, torch.tensor([[0.0, 0.0, 1.0]]), atol=1e-6, rtol=0.0)
    gradients = [torch.autograd.grad((x * weight).sum(), logits, retain_graph=True)[0] for x in (soft, hard)]
    assert_close(*gradients)
    p = soft.detach()
    assert_close(gradients[0], 2.0 * p * (weight - (p * weight).sum()))


def test_masked_actions_have_no_share():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    soft = relaxed_one_hot(torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0]]), 0.1, False, mask)
    assert_close(soft, torch.tensor([[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]]))

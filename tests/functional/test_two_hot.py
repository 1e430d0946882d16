"""Symlog and two-hot regression against values computed by hand, and against the authors' formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlplug.functional import symexp, symexp_bins, symlog, two_hot, two_hot_loss, two_hot_mean


def test_symlog_by_hand():
    x = torch.tensor([-1000.0, 0.0, np.e - 1.0, 1e-8], dtype=torch.float64)
    expected = torch.tensor([-6.908754779315221, 0.0, 1.0, 9.99999995e-09], dtype=torch.float64)
    torch.testing.assert_close(symlog(x), expected, atol=0.0, rtol=1e-12)
    torch.testing.assert_close(symexp(symlog(x)), x, atol=0.0, rtol=1e-12)


def test_two_hot_by_hand():
    bins = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    x = torch.tensor([0.3, 2.0, 1.0, 7.0, -3.0])
    expected = [[0.0, 0.7, 0.3, 0.0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    torch.testing.assert_close(two_hot(x, bins), torch.tensor(expected))


@pytest.mark.parametrize("n", [7, 8, 255])
def test_bins_are_symmetric_and_their_mean_is_zero(n):
    bins = symexp_bins(n)
    assert torch.equal(bins, -bins.flip(0))
    assert (bins.diff() > 0).all() if n % 2 else (bins.diff() >= 0).all()
    torch.testing.assert_close(bins[-1], torch.tensor(20.0).expm1())
    assert two_hot_mean(torch.zeros(3, n), bins).eq(0.0).all()  # summed in order, 255 bins have a mean of about 1


def original_loss(logits, target, bins):
    """As in ``embodied/jax/outs.py`` of danijar/dreamerv3, in NumPy."""
    below = np.clip((bins <= target[..., None]).sum(-1) - 1, 0, len(bins) - 1)
    above = np.clip(len(bins) - (bins > target[..., None]).sum(-1), 0, len(bins) - 1)
    equal = below == above
    to_below = np.where(equal, 1, np.abs(bins[below] - target))
    to_above = np.where(equal, 1, np.abs(bins[above] - target))
    weights = np.stack([to_above, to_below], -1) / (to_below + to_above)[..., None]
    hot = np.eye(len(bins))[below] * weights[..., :1] + np.eye(len(bins))[above] * weights[..., 1:]
    return -(hot * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1)


def test_the_loss_equals_the_original():
    bins = symexp_bins(255).double()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 255, generator=generator, dtype=torch.float64)
    x = symexp(6.0 * torch.randn(40, generator=generator, dtype=torch.float64))
    x[:3] = torch.tensor([0.0, float(bins[9]), 1e12])
    expected = torch.from_numpy(original_loss(logits.numpy(), x.numpy(), bins.numpy()))
    torch.testing.assert_close(two_hot_loss(logits, x, bins), expected, atol=1e-9, rtol=1e-9)
    logits.requires_grad_()
    dense = -(two_hot(x, bins) * logits.log_softmax(-1)).sum(-1)
    found, weight = two_hot_loss(logits, x, bins), torch.linspace(-1.0, 2.0, 40, dtype=torch.float64)
    torch.testing.assert_close(found, dense, atol=1e-9, rtol=1e-9)
    gradients = [torch.autograd.grad((weight * loss).sum(), logits)[0] for loss in (found, dense)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("n", [254, 255])
def test_the_mean_of_a_two_hot_target_is_the_number(n):
    bins, x = symexp_bins(n).double(), torch.tensor([0.0, -3.7, 512.25, -1e5], dtype=torch.float64)
    torch.testing.assert_close((two_hot(x, bins) * bins).sum(-1), x, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(two_hot_mean(two_hot(x, bins).log(), bins), x, atol=1e-6, rtol=1e-9)

"""Quasi-random normal points."""

import math

import torch

from rlplug.functional.quadrature import normal_points


def test_they_are_normal_and_always_the_same():
    before = torch.get_rng_state()
    points = normal_points(1024, 3)
    assert torch.equal(points, normal_points(1024, 3))
    assert torch.equal(before, torch.get_rng_state())
    assert points.shape == (1024, 3)
    assert points.dtype == torch.float32
    assert torch.allclose(points.mean(0), torch.zeros(3), atol=2e-3)
    assert torch.allclose(points.T @ points / 1024, torch.eye(3), atol=3e-2)


def test_they_integrate_better_than_as_many_draws():
    def error(x):  # E[exp(x + y)] = e
        return abs(x.double().sum(-1).exp().mean() - math.e)

    generator = torch.Generator().manual_seed(0)
    draws = sum(error(torch.randn(256, 2, generator=generator)) for _ in range(20)) / 20
    assert error(normal_points(256, 2)) < draws / 3

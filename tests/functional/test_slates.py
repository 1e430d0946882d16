"""Values and choices of slates: by hand, and against the enumeration of all slates."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlplug.functional.slates import exact_slate, greedy_slate, slate_value, top_k

V, Q, ONE, ZERO = (torch.tensor(x) for x in ([[1.0, 2.0, 3.0]], [[10.0, 20.0, 5.0]], [1.0], [0.0]))


@pytest.mark.parametrize(("slate", "value"), [([0, 1], 12.5), ([0, 2], 5.0), ([1, 2], 55 / 6)])
def test_values_by_hand(slate, value):
    torch.testing.assert_close(slate_value(V, Q, ONE, ZERO, torch.tensor([slate])), torch.tensor([value]))


def test_top_k_is_not_optimal():
    assert set(top_k(V, Q, 2)[0].tolist()) == {1, 2}
    assert set(exact_slate(V, Q, ONE, ZERO, 2)[0].tolist()) == {0, 1}
    assert greedy_slate(V, Q, ONE, ZERO, 2)[0].tolist() == [1, 0]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_exact_slate_is_the_best_of_all(k):
    draw = torch.Generator().manual_seed(k)
    v, none = torch.rand(200, 6, generator=draw).double() * 3 + 0.01, torch.rand(200, generator=draw).double() + 0.01
    q, q_none = (torch.randn(*x, generator=draw).double() * 5 for x in ((200, 6), (200,)))
    every = torch.tensor([*itertools.combinations(range(6), k)])
    values = torch.stack([slate_value(v, q, none, q_none, slate.expand(200, -1)) for slate in every], 1)
    found = exact_slate(v, q, none, q_none, k)
    assert all(len({*row}) == k for row in found.tolist())
    torch.testing.assert_close(slate_value(v, q, none, q_none, found), values.amax(1))
    greedy = greedy_slate(v, q, none, q_none, k)
    assert all(len({*row}) == k for row in greedy.tolist())
    assert (slate_value(v, q, none, q_none, greedy) <= values.amax(1) + 1e-12).all()


def test_ten_rounds_are_enough_for_a_thousand_documents():
    draw = torch.Generator().manual_seed(0)
    v, q = (torch.randn(100, 1000, generator=draw).double() * 2).exp(), torch.randn(100, 1000, generator=draw).double()
    none, q_none = torch.ones(100).double(), torch.zeros(100).double()
    slate = exact_slate(v, q, none, q_none, 10)
    value = slate_value(v, q, none, q_none, slate)
    again = (v * (q - value.unsqueeze(-1))).topk(10, -1).indices  # Dinkelbach: the optimum is the fixed point
    torch.testing.assert_close(slate_value(v, q, none, q_none, again), value, rtol=1e-12, atol=0)

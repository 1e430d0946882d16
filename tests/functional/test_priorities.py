"""Proportional priorities: exact values, and a sum tree that is what adding up anew gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.functional.priorities import SumTree, importance_weights, proportional, sequence_priority


def test_probabilities_and_weights_of_the_paper():
    """Priorities 1 to 4, alpha 0.6, beta 0.4."""
    p = proportional(np.arange(1.0, 5.0), 0.6, 0.0)
    prob = torch.from_numpy(p / p.sum())
    weight = importance_weights(prob, 4, 0.4)
    torch.testing.assert_close(prob, torch.tensor([0.14823, 0.22467, 0.28655, 0.34054]).double(), atol=6e-6, rtol=0)
    wanted = torch.tensor([1.0, 0.84675, 0.76823, 0.71698]).double()
    torch.testing.assert_close(weight / weight.max(), wanted, atol=6e-6, rtol=0)


def test_a_negative_error_counts_by_its_size_and_none_is_zero():
    assert proportional(-3.0, 1.0, 0.5) == 3.5
    assert proportional(0.0, 1.0, 1e-6) == 1e-6


def test_weights_are_one_where_draws_are_uniform():
    torch.testing.assert_close(importance_weights(torch.full((3,), 0.25), 4, 0.7), torch.ones(3))


def test_the_priority_of_a_sequence_mixes_the_largest_and_the_mean_error_of_its_valid_rows():
    error = torch.tensor([[1.0, 4.0, 9.0], [3.0, 7.0, 9.0]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(sequence_priority(error, valid), torch.tensor([2.0, 4.0, 0.0]))
    torch.testing.assert_close(sequence_priority(error, valid, 0.9), torch.tensor([2.9, 4.0, 0.0]))
    torch.testing.assert_close(sequence_priority(error, valid, 1.0), torch.tensor([3.0, 4.0, 0.0]))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20_000), st.data())
def test_against_brute_force(size, data):
    tree, truth = SumTree(size), np.zeros(size)
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 6))):
        index = dice.integers(0, size, dice.choice([1, 2, 40, 300]))
        weight = dice.choice([0.0, 1e-9, 0.3, 1.0, 1e6], len(index)) * dice.random(len(index))
        tree.set(index, weight)
        for i, w in zip(index, weight, strict=True):
            truth[i] = w
    np.testing.assert_array_equal(tree[np.arange(size)], truth)
    np.testing.assert_allclose(tree.total, truth.sum(), rtol=1e-12)
    if tree.total == 0:
        return
    shares = np.concatenate([dice.random(100), [0.0, np.nextafter(1.0, 0.0)]])
    drawn = tree.draw(shares)
    assert (truth[drawn] > 0).all()
    ends = truth.cumsum()
    rounding = 1e-9 * tree.total
    assert (ends[drawn] >= shares * ends[-1] - rounding).all()
    assert ((ends - truth)[drawn] <= shares * ends[-1] + rounding).all()


def test_no_error_builds_up():
    """After many updates a tree is, bit for bit, one that was filled at once."""
    dice, size = np.random.default_rng(0), 12_000
    tree = SumTree(size)
    for _ in range(2000):
        tree.set(dice.integers(0, size, 32), 10.0 ** dice.integers(-8, 9, 32))
    fresh = SumTree(size)
    fresh.set(np.arange(size), tree[np.arange(size)])
    shares = dice.random(5000)
    assert tree.total == fresh.total
    np.testing.assert_array_equal(tree.draw(shares), fresh.draw(shares))
    tree.set(np.arange(size), 0.0)
    assert tree.total == 0.0


def test_items_of_weight_zero_are_never_drawn_however_shares_round():
    tree = SumTree(192)
    tree.set(np.array([62, 64, 133]), np.array([0.1, 0.2, 0.7]))
    shares = np.concatenate([np.nextafter(x, [0.0, 1.0]) for x in (0.1, 0.3, 0.1 + 0.2)] + [[1 - 2**-53, 0.0]])
    assert set(tree.draw(shares).tolist()) <= {62, 64, 133}
    for weight in np.random.default_rng(0).random((300, 3)):
        tree.set(np.arange(192), 0.0)
        tree.set(np.array([5, 69, 133]), weight)
        ends = weight.cumsum() / tree.total
        shares = np.concatenate([np.nextafter(ends[:2], 0.0), ends[:2], np.nextafter(ends[:2], 1.0), [0.0, 1.0]])
        assert set(tree.draw(shares).tolist()) <= {5, 69, 133}


@pytest.mark.parametrize("size", [1, 2, 64, 65, 4097])
def test_bytes(size):
    assert SumTree.nbytes(size) == SumTree(size)._sums.nbytes


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 5), st.data())
def test_parts_are_drawn_from_as_trees_of_their_own(size, parts, data):
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tree, alone = SumTree(size, parts), [SumTree(size) for _ in range(parts)]
    assert SumTree.nbytes(size, parts) == tree._sums.nbytes
    for part, other in enumerate(alone):
        weight = dice.random(size) * dice.choice([0.0, 1.0], size)
        tree.set(part * tree.stride + np.arange(size), weight)
        other.set(np.arange(size), weight)
    np.testing.assert_array_equal(tree.totals, [other.total for other in alone])
    part, share = dice.integers(0, parts, 50), dice.random(50)
    drawn = tree.draw(share, part) - part * tree.stride
    wanted = [alone[p].draw(np.array([s]))[0] for p, s in zip(part, share, strict=True)]
    filled = tree.totals[part] > 0
    np.testing.assert_array_equal(drawn[filled], np.array(wanted)[filled])

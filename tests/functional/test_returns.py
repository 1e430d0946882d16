import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional import discounted_sum, gae, n_step, reverse_scan
from tests.functional.streams import build, gae_of_episode, streams

unit = st.floats(0.0, 1.0)


def advantages(reward, value, terminated, valid, gamma=0.9, lambda_=0.8):
    rows = [torch.tensor(x)[:, None] for x in (reward, value, terminated, valid)]
    advantage, ret = gae(*rows, gamma, lambda_)
    assert_close(ret, advantage + rows[1])
    return advantage[:, 0]


def test_gae_of_an_open_end_by_hand():
    out = advantages([1.0, 1.0, 1.0, 0.0], [0.5, 0.6, 0.7, 0.8], [False] * 4, [True, True, True, False])
    assert_close(out, torch.tensor([2.310368, 1.7644, 1.02, 0.0]))


@pytest.mark.parametrize(
    ("terminated", "final_value", "expected"),
    [(True, 2.0, [1.328, 0.4, 0.0, 1.02, 0.0]), (False, 2.0, [2.624, 2.2, 0.0, 1.02, 0.0])],
)
def test_gae_of_an_episode_that_ends_within_by_hand(terminated, final_value, expected):
    out = advantages(
        [1.0, 1.0, 0.0, 1.0, 0.0],
        [0.5, 0.6, final_value, 0.7, 0.8],
        [False, terminated, False, False, False],
        [True, True, False, True, False],
    )
    assert_close(out, torch.tensor(expected))


@settings(deadline=None)
@given(stream=streams, gamma=unit, lambda_=unit)
def test_gae_equals_brute_force_per_episode(stream, gamma, lambda_):
    b = stream.batch
    advantage, ret = gae(b["reward"], b["value"], b["terminated"], b["valid"], gamma, lambda_)
    assert (advantage[~b["valid"]] == 0).all()
    for episode in stream.episodes:
        reward, value = (b[key][episode.rows, episode.column] for key in ("reward", "value"))
        expected = gae_of_episode(reward[:-1], value, episode.end, gamma, lambda_)
        assert_close(advantage[episode.rows, episode.column][:-1], expected)
        assert_close(ret[episode.rows, episode.column][:-1], expected + value[:-1])


def test_gae_in_single_precision_over_a_long_segment():
    stream = build([[(200, "truncated"), (300, "terminated")], [(1, "terminated")] * 100], 1000, seed=3)
    b = stream.batch
    exact, _ = gae(b["reward"], b["value"], b["terminated"], b["valid"], 0.999, 0.99)
    single, _ = gae(b["reward"].float(), b["value"].float(), b["terminated"], b["valid"], 0.999, 0.99)
    assert single.dtype == torch.float32
    assert_close(single, exact.float(), rtol=1e-4, atol=1e-4)


def test_gae_keeps_an_axis_of_agents():
    stream = build([[(3, "terminated")], [(5, "truncated")], [], [(2, "truncated")]], 9, seed=1)
    rows = [stream.batch[key] for key in ("reward", "value", "terminated", "valid")]
    flat, _ = gae(*rows, 0.9, 0.8)
    agents, _ = gae(*(x.view(10, 2, 2) for x in rows), 0.9, 0.8)
    assert_close(agents.flatten(1), flat)


@settings(deadline=None)
@given(length=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_reverse_scan_equals_the_recursion(length, seed):
    generator = torch.Generator().manual_seed(seed)
    decay, x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    before, y, expected = x.clone(), torch.zeros(3, dtype=torch.float64), []
    for t in reversed(range(length)):
        y = x[t] + decay[t] * y
        expected.insert(0, y)
    assert_close(reverse_scan(decay, x), torch.stack(expected))
    assert_close(x, before, rtol=0, atol=0)


def test_n_step_by_hand():
    reward = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    terminated = torch.tensor([[False, False], [False, True], [False, False], [False, False]])
    valid = torch.tensor([[True, True], [True, True], [True, False], [False, True]])
    ret, discount, last = n_step(reward, terminated, valid, 0.9)
    assert_close(ret + discount * 10.0, torch.tensor([12.52, 2.8]))
    assert last.tolist() == [3, 2]
    assert last.dtype == torch.int64


def test_n_step_stops_at_a_truncated_end_and_bootstraps_there():
    reward = torch.tensor([[1.0], [2.0], [100.0], [100.0]])
    valid = torch.tensor([[True], [True], [False], [True]])
    ret, discount, last = n_step(reward, torch.zeros_like(valid), valid, 0.5)
    assert (ret.item(), discount.item(), last.item()) == (2.0, 0.25, 2)


@pytest.mark.parametrize("n", [1, 3])
def test_n_step_of_a_window_without_transition(n):
    reward, nothing = torch.full((n + 1, 2), 7.0), torch.zeros(n + 1, 2, dtype=torch.bool)
    ret, discount, last = n_step(reward, nothing, nothing, 0.9)
    assert (ret.tolist(), discount.tolist(), last.tolist()) == ([0.0, 0.0], [1.0, 1.0], [0, 0])


@given(stream=streams, gamma=unit, within=st.booleans())
def test_discounted_sum_runs_in_time_order(stream, gamma, within):
    """Across episodes, or within each of them."""
    reward, valid, first = (stream.batch[key] for key in ("reward", "valid", "is_first"))
    before = torch.linspace(-1.0, 1.0, reward.shape[1], dtype=reward.dtype)
    found = discounted_sum(reward, valid, before, gamma, first if within else None)
    for t, row in enumerate(reward):
        before = torch.where(first[t], 0.0, before) if within else before
        before = torch.where(valid[t], gamma * before + row, before)
        assert_close(found[t], before)


@given(stream=streams, within=st.booleans())
def test_discounted_sum_of_two_segments_is_that_of_one(stream, within):
    reward, valid, first = (stream.batch[key] for key in ("reward", "valid", "is_first"))

    def sums(rows, before):
        return discounted_sum(reward[rows], valid[rows], before, 0.9, first[rows] if within else None)

    start = torch.ones_like(reward[0])
    whole, cut = sums(slice(None), start), len(reward) // 2
    head = sums(slice(cut), start) if cut else start[None]
    assert_close(sums(slice(cut, None), head[-1]), whole[cut:])

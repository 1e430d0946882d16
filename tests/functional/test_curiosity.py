import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional.curiosity import discounted_sum, prediction_error
from tests.functional.streams import streams


def test_prediction_error_is_half_the_squared_distance():
    """Features (1, 2) that were predicted as 0 are worth 0.125 with eta 0.05."""
    error = prediction_error(torch.zeros(3, 2), torch.tensor([1.0, 2.0]).expand(3, 2))
    assert_close(0.05 * error, torch.full((3,), 0.125))


@given(stream=streams, gamma=st.floats(0.0, 1.0))
def test_discounted_sum_runs_in_time_order_across_episodes(stream, gamma):
    reward, valid = stream.batch["reward"], stream.batch["valid"]
    before = torch.linspace(-1.0, 1.0, reward.shape[1], dtype=reward.dtype)
    found = discounted_sum(reward, valid, before, gamma)
    for t, row in enumerate(reward):
        before = torch.where(valid[t], gamma * before + row, before)
        assert_close(found[t], before)


@given(stream=streams)
def test_discounted_sum_of_two_segments_is_that_of_one(stream):
    reward, valid = stream.batch["reward"], stream.batch["valid"]
    start = torch.ones_like(reward[0])
    whole, cut = discounted_sum(reward, valid, start, 0.9), len(reward) // 2
    first = discounted_sum(reward[:cut], valid[:cut], start, 0.9) if cut else start[None]
    second = discounted_sum(reward[cut:], valid[cut:], first[-1], 0.9)
    assert_close(second, whole[cut:])

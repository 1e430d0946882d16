import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional.td import dueling, forbid, gather_action, greedy, huber, inverse_rescale, rescale, retrace
from tests.functional.streams import streams


def test_double_by_hand():
    """Reward 1, gamma 0.9: judged is what the online network prefers, 2, and not the largest, 10."""
    online, target = torch.tensor([[3.0, 1.0]]), torch.tensor([[2.0, 10.0]])
    double = target.gather(-1, greedy(online)[..., None])
    single = target.gather(-1, greedy(target)[..., None])
    assert_close(1.0 + 0.9 * torch.cat((double, single)), torch.tensor([[2.8], [10.0]]))


def test_dueling_by_hand():
    assert_close(dueling(torch.tensor([2.0]), torch.tensor([1.0, 3.0])), torch.tensor([1.0, 3.0]))
    value, advantage = torch.tensor([[2.0, 5.0]]), torch.tensor([[1.0, 0.0], [3.0, -4.0]])  # [1, atoms], [A, atoms]
    assert_close(dueling(value, advantage, dim=-2), torch.tensor([[1.0, 7.0], [3.0, 3.0]]))


def test_forbidden_actions_are_never_the_best():
    q, mask = torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[True, False, True]])
    assert greedy(q, mask).tolist() == [2]
    assert greedy(q).tolist() == [1]
    assert forbid(q, mask).tolist() == [[1.0, torch.finfo(torch.float32).min, 2.0]]
    assert greedy(torch.full((1, 3), -1e30), torch.tensor([[False, False, True]])).tolist() == [2]
    assert forbid(q, None) is q


def test_what_belongs_to_one_action():
    q = torch.arange(24.0).view(2, 2, 3, 2)  # [T, B, A, atoms]
    action = torch.tensor([[0, 2], [1, 1]])
    assert gather_action(q, action).tolist() == [[[0.0, 1.0], [10.0, 11.0]], [[14.0, 15.0], [20.0, 21.0]]]
    assert gather_action(q[0], action[0]).tolist() == [[0.0, 1.0], [10.0, 11.0]]


@pytest.mark.parametrize("delta", [1.0, 0.5])
def test_huber_is_a_parabola_with_straight_ends(delta):
    error = torch.tensor([0.0, 0.3, -0.5, 1.0, -1.0, 4.0, -4.0])
    size = error.abs()
    assert_close(huber(error, delta), torch.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta)))
    assert_close(huber(torch.tensor([0.5, -3.0])), torch.tensor([0.125, 2.5]))


def test_value_rescaling_by_hand():
    h = rescale(torch.tensor([1.0, -10.0, 0.0]), 1e-3)
    assert_close(h, torch.tensor([0.4152136, -2.3266248, 0.0]))
    assert_close(inverse_rescale(h, 1e-3), torch.tensor([1.0, -10.0, 0.0]), rtol=1e-5, atol=1e-6)


@given(x=st.floats(-1e6, 1e6), eps=st.sampled_from([1e-3, 1e-2, 1.0]))
def test_value_rescaling_has_an_inverse(x, eps):
    exact = torch.tensor(x, dtype=torch.float64)
    assert_close(inverse_rescale(rescale(exact, eps), eps), exact, rtol=1e-9, atol=1e-9)
    single = exact.float()
    assert_close(inverse_rescale(rescale(single, eps), eps), single, rtol=1e-3, atol=1e-5)


def column(*values):
    return torch.tensor(values)[:, None]


def test_retrace_by_hand():
    """Ratios 0.5 and 3 of the second and third action; the third one ends the episode."""
    goal = retrace(
        reward=column(1.0, 1.0, 1.0, 0.0),
        q=column(1.0, 2.0, 3.0, 7.0),
        expected=column(9.0, 1.5, 2.5, 8.0),
        trace=column(9.0, 0.5, 3.0, 9.0).clamp(max=1.0),
        terminated=column(False, False, True, False),
        valid=column(True, True, True, False),
        gamma=0.9,
    )
    assert_close(goal, column(2.1025, 1.45, 1.0))


@settings(deadline=None)
@given(stream=streams, gamma=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_retrace_equals_brute_force_per_episode(stream, gamma, seed):
    b, generator = stream.batch, torch.Generator().manual_seed(seed)
    q, trace = (torch.rand(b["value"].shape, generator=generator, dtype=torch.float64) for _ in range(2))
    goal = retrace(b["reward"], q, b["value"], trace, b["terminated"], b["valid"], gamma)
    for episode in stream.episodes:
        rows = range(episode.start, episode.start + episode.length)
        for t in reversed(rows):
            row, after = (t, episode.column), (t + 1, episode.column)
            if t + 1 not in rows:
                follow = 0.0 if episode.end == "terminated" else b["value"][after]
            else:
                follow = b["value"][after] + trace[after] * (goal[after] - q[after])
            assert_close(goal[row], b["reward"][row] + gamma * follow, rtol=1e-7, atol=1e-9)

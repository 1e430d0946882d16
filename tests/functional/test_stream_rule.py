"""The stream rule with recurrence: one unroll over stream rows is as good as one unroll per episode."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from rlplug.functional import gae, n_step
from tests.functional.streams import build, gae_of_episode, n_step_of_episode, streams


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(3, 4).double(), nn.Linear(4, 1).double()

    def forward(self, obs, is_first, carry):
        """Values ``[T+1, B]``, in one pass that clears the state where an episode begins."""
        values = []
        for x, first in zip(obs, is_first, strict=True):
            carry = self.cell(x, tuple(torch.where(first[:, None], 0.0, state) for state in carry))
            values.append(self.head(carry[0])[:, 0])
        return torch.stack(values)


critic = Critic()


def stream_and_episodes(stream):
    """Values of one unroll over the stream, and per episode those of an unroll of its own."""
    b, columns = stream.batch, stream.batch["valid"].shape[1]
    carry = torch.randn(2, columns, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)
    alone = []
    with torch.no_grad():
        value = critic(b["obs"], b["is_first"], carry)
        for episode in stream.episodes:
            obs = b["obs"][episode.rows, episode.column, None]
            continued = not b["is_first"][episode.start, episode.column]
            begin = [s[episode.column, None] if continued else torch.zeros(1, 4, dtype=torch.float64) for s in carry]
            alone.append(critic(obs, torch.zeros(len(obs), 1, dtype=torch.bool), begin)[:, 0])
    return value, alone


def check(stream, gamma, lambda_, n):
    b = stream.batch
    value, alone = stream_and_episodes(stream)
    advantage, _ = gae(b["reward"], value, b["terminated"], b["valid"], gamma, lambda_)
    for episode, own in zip(stream.episodes, alone, strict=True):
        reward = b["reward"][episode.rows, episode.column][:-1]
        expected = gae_of_episode(reward, own, episode.end, gamma, lambda_)
        assert_close(advantage[episode.rows, episode.column][:-1], expected)
        for t in range(min(episode.length, len(value) - n - episode.start)):
            rows = slice(episode.start + t, episode.start + t + n + 1)
            window = (b[key][rows, episode.column, None] for key in ("reward", "terminated", "valid"))
            ret, discount, last = n_step(*window, gamma)
            expected = n_step_of_episode(reward, own, episode.end, gamma, n, t)
            assert_close((ret + discount * value[rows, episode.column][last])[0], expected)


def test_lstm_with_gae_and_n_step_for_every_kind_of_end():
    stream = build([[(4, "terminated"), (3, "truncated")], [(2, "truncated"), (5, "terminated")], []], 12, seed=5)
    assert {episode.end for episode in stream.episodes} == {"terminated", "truncated", "open"}
    check(stream, 0.97, 0.9, n=3)


@settings(deadline=None, max_examples=40)
@given(stream=streams, gamma=st.floats(0.0, 1.0), lambda_=st.floats(0.0, 1.0), n=st.integers(1, 4))
def test_lstm_with_gae_and_n_step_for_any_stream(stream, gamma, lambda_, n):
    check(stream, gamma, lambda_, n)


def test_gradient_of_the_stream_equals_that_of_the_episodes():
    stream = build([[(4, "terminated"), (3, "truncated")], [(2, "truncated")]], 9, seed=2)
    b = stream.batch
    zeros = torch.zeros(2, 2, 4, dtype=torch.float64).unbind(0)
    value = critic(b["obs"], b["is_first"], zeros)
    together = torch.autograd.grad(value[b["valid"]].square().sum(), list(critic.parameters()))
    alone = 0.0
    for episode in stream.episodes:
        obs = b["obs"][episode.rows, episode.column, None]
        nothing = torch.zeros(len(obs), 1, dtype=torch.bool)
        alone = alone + critic(obs, nothing, [s[:1] for s in zeros])[:-1].square().sum()
    assert_close(together, torch.autograd.grad(alone, list(critic.parameters())))

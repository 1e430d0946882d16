"""V-trace against values worked out by hand, the sum of the paper, and what it is on-policy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional import gae, vtrace
from tests.functional.streams import streams

unit = st.floats(0.0, 1.0)
limit = st.one_of(st.none(), st.floats(0.1, 2.0))


def column(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)[:, None]


def case(ratio=(2.0, 1.5, 0.25)):
    """Three transitions and the row to bootstrap from, which is row T or a final observation."""
    log_rho = column(*map(math.log, ratio), math.nan)
    terminated, valid = torch.zeros(4, 1, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)
    valid[3] = False
    return log_rho, column(1, 2, 3, math.nan), column(0.1, 0.2, 0.3, 0.4), terminated, valid, 0.9


def test_by_hand():
    target, advantage = vtrace(*case())
    assert_close(target, column(3.66265, 2.9585, 1.065, 0.4))
    assert_close(advantage, column(3.56265, 2.7585, 0.765, 0.0))


@settings(deadline=None)
@given(stream=streams, gamma=unit, lambda_=unit)
def test_on_policy_it_is_td_lambda(stream, gamma, lambda_):
    b = stream.batch
    rows = b["reward"], b["value"], b["terminated"], b["valid"], gamma
    target, advantage = vtrace(torch.zeros_like(b["value"]), *rows, lambda_)
    of_gae, returns = gae(*rows, lambda_)
    assert_close(target, returns)
    if lambda_ == 1.0:
        assert_close(advantage, of_gae)


@settings(deadline=None)
@given(stream=streams, gamma=unit, lambda_=unit, limits=st.tuples(limit, limit, limit), seed=st.integers(0, 2**31))
def test_it_is_the_sum_of_equation_1_in_every_episode(stream, gamma, lambda_, limits, seed):
    b = stream.batch
    log_rho = torch.randn(b["value"].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = log_rho, b["reward"], b["value"], b["terminated"], b["valid"]
    target, advantage = vtrace(*rows, gamma, lambda_, *limits)
    assert not advantage[~b["valid"]].any()
    assert_close(target[~b["valid"]], b["value"][~b["valid"]])

    def clipped(x: float, limit: float | None) -> float:
        return x if limit is None else min(x, limit)

    for episode in stream.episodes:
        ratio, r, v = (x[episode.rows, episode.column].tolist() for x in (log_rho.exp(), b["reward"], b["value"]))
        length = episode.length
        if episode.end == "terminated":
            v[length] = 0.0
        rho, c = [clipped(x, limits[0]) for x in ratio], [lambda_ * clipped(x, limits[1]) for x in ratio]
        delta = [rho[t] * (r[t] + gamma * v[t + 1] - v[t]) for t in range(length)]
        of_paper = [
            v[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, length)) for s in range(length)
        ]
        behind = [*of_paper[1:], v[length]]
        gradient = [clipped(ratio[s], limits[2]) * (r[s] + gamma * behind[s] - v[s]) for s in range(length)]
        place = slice(episode.start, episode.start + length), episode.column
        assert_close(target[place], torch.tensor(of_paper, dtype=torch.float64))
        assert_close(advantage[place], torch.tensor(gradient, dtype=torch.float64))


@pytest.mark.parametrize("ratio", [0.0, 1e30])
def test_ratios_may_be_as_extreme_as_they_like(ratio):
    log_rho = torch.full((4, 1), math.log(ratio) if ratio else -math.inf, dtype=torch.float64)
    target, advantage = vtrace(log_rho, *case()[1:])
    assert target.isfinite().all()
    assert advantage.isfinite().all()

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional.sequences import chunks, n_step_rows
from tests.functional.streams import n_step_of_episode, streams


def rollout(rows: int, columns: int):
    """Leaves that say where they stood: ``obs`` is (row, column), ``carry.h`` the same."""
    row, column = torch.meshgrid(torch.arange(rows + 1), torch.arange(columns), indexing="ij")
    place = torch.stack((row, column), -1).float()
    valid = torch.ones(rows + 1, columns, dtype=torch.bool)
    return {"obs": {"place": place}, "valid": valid, "carry": {"policy": {"h": place}}}


@pytest.mark.parametrize(("rows", "length", "per_column"), [(12, 4, 3), (10, 4, 3), (3, 8, 1), (5, 1, 5)])
def test_chunks_hold_every_row_once_behind_its_own_state(rows, length, per_column):
    out = chunks(rollout(rows, columns=2), length)
    length = min(length, rows)
    place, valid, carry = out["obs"]["place"], out["valid"], out["carry"]["policy"]["h"]
    assert place.shape == (length, 2 * per_column, 2)
    assert carry.shape == (1, 2 * per_column, 2)
    assert sorted(map(tuple, place[valid].int().tolist())) == [(t, b) for t in range(rows) for b in range(2)]
    assert torch.equal(carry[0], place[0])
    first = [(t, b) for b in range(2) for t in range(0, rows, length)]  # a column's chunks side by side
    assert list(map(tuple, carry[0].int().tolist())) == first
    steps = (place[1:] - place[:-1])[valid[1:]]
    assert torch.equal(steps, torch.tensor([1.0, 0.0]).expand_as(steps))


def test_chunks_keep_rows_that_were_not_valid_so():
    batch = rollout(8, columns=1)
    batch["valid"][3] = False
    out = chunks(batch, 4)
    assert out["valid"].T.tolist() == [[True, True, True, False], [True] * 4]


@settings(deadline=None)
@given(stream=streams, gamma=st.floats(0.0, 1.0), n=st.integers(1, 5))
def test_n_step_rows_equals_brute_force_per_episode(stream, gamma, n):
    b = stream.batch
    assume(len(b["reward"]) > n)
    ret, discount, last = n_step_rows(b["reward"], b["terminated"], b["valid"], gamma, n)
    assert len(ret) == len(b["reward"]) - n
    columns = torch.arange(ret.shape[1])
    target = ret + discount * b["value"][last, columns]
    nothing = ~b["valid"][: len(ret)]
    assert_close(target[nothing], b["value"][: len(ret)][nothing])
    for episode in stream.episodes:
        reward, value = (b[key][episode.rows, episode.column] for key in ("reward", "value"))
        for t in range(min(episode.length, len(ret) - episode.start)):
            expected = n_step_of_episode(reward[:-1], value, episode.end, gamma, n, t)
            assert_close(target[episode.start + t, episode.column], expected)

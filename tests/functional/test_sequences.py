from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional.sequences import (
    chunks,
    longest,
    n_step_rows,
    n_step_segment,
    n_step_sequences,
    n_step_transitions,
)
from rlplug.types import ConfigError
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


def replayed(rows: int, columns: int):
    """Rows as a buffer gives them; ``obs`` and ``action_mask`` number the rows; column 0 terminates with row 2."""
    batch = rollout(rows - 1, columns)
    row = batch["obs"]["place"][..., 0]
    batch |= {"action": row, "reward": torch.ones(rows, columns), "action_mask": row[..., None] > torch.arange(rows)}
    batch |= {key: torch.zeros(rows, columns, dtype=torch.bool) for key in ("terminated", "is_first")}
    batch["terminated"][2, 0], batch["valid"][3, 0] = True, False
    return batch


def test_a_transition_is_the_first_row_of_its_window_and_the_one_to_bootstrap_from():
    out = n_step_transitions(replayed(rows=5, columns=2), gamma=0.5)
    assert out["returns"].tolist() == [1.75, 1.875]
    assert out["discount"].tolist() == [0.0, 0.0625]
    assert out["obs"]["place"].tolist() == [[0, 0], [0, 1]]
    assert out["action"].tolist() == [0, 0]
    assert out["next_obs"]["place"].tolist() == [[3, 0], [4, 1]]
    assert out["action_mask"].sum(-1).tolist() == [0, 0]
    assert out["next_action_mask"].sum(-1).tolist() == [3, 4]


@pytest.mark.parametrize("burn_in", [0, 1])
def test_the_targets_of_a_sequence_are_those_of_every_window_in_it(burn_in):
    batch, n = replayed(rows=7, columns=2), 2
    out = n_step_sequences(batch, 0.5, n, burn_in)
    length = 7 - n - burn_in
    assert out["obs"] is batch["obs"]
    assert out["carry"] is batch["carry"]
    assert torch.equal(out["valid"], batch["valid"][burn_in : burn_in + length])
    for t in range(length):
        first = burn_in + t
        window = {key: batch[key][first : first + n + 1] for key in batch.keys() - {"obs", "carry"}}
        alone = n_step_transitions(window | {"obs": batch["obs"]["place"][first : first + n + 1]}, 0.5)
        for key in ("returns", "discount", "action", "action_mask", "next_action_mask"):
            assert torch.equal(out[key][t], alone[key])
        bootstrap = batch["obs"]["place"][burn_in:][out["last"][t], torch.arange(2)]
        assert torch.equal(bootstrap, alone["next_obs"])


def test_transitions_and_sequences_without_masks_have_none():
    batch = replayed(rows=4, columns=2)
    del batch["action_mask"]
    assert (
        not {"action_mask", "next_action_mask"}
        & (n_step_transitions(batch, 0.9) | n_step_sequences(batch, 0.9, 1)).keys()
    )


@settings(deadline=None)
@given(stream=streams, gamma=st.floats(0.0, 1.0), n=st.integers(1, 5))
def test_targets_of_a_segment_end_with_it(stream, gamma, n):
    b = stream.batch | {"action": torch.arange(stream.batch["reward"].numel()).view(stream.batch["reward"].shape)}
    out = n_step_segment(b, gamma, n)
    assert torch.equal(out["action"], b["action"][:-1])
    assert torch.equal(out["valid"], b["valid"][:-1])
    assert out["obs"] is b["obs"]
    target = out["returns"] + out["discount"] * b["value"][out["last"], torch.arange(b["value"].shape[1])]
    for episode in stream.episodes:
        reward, value = (b[key][episode.rows, episode.column] for key in ("reward", "value"))
        for t in range(episode.length):
            expected = n_step_of_episode(reward[:-1], value, episode.end, gamma, n, t)
            assert_close(target[episode.start + t, episode.column], expected)


# ---- a number of rewards for each sample ---------------------------------------------------------------------------


def by_hand(batch, t: int, column: int, n: int, gamma: float) -> tuple[float, float, int]:
    """Return sum, discount and row to bootstrap from of the transition at a row."""
    total, factor = 0.0, 1.0
    for k in range(n):
        if not batch["valid"][t + k, column]:
            return total, factor, t + k
        total += factor * batch["reward"][t + k, column].item()
        factor *= gamma
        if batch["terminated"][t + k, column]:
            return total, 0.0, t + k + 1
    return total, factor, t + n


def uneven(rows: int, columns: int):
    """Rows with random rewards, in double precision; some episodes terminate and some are truncated."""
    torch.manual_seed(1)
    batch = rollout(rows - 1, columns)
    batch |= {"action": torch.zeros(rows, columns), "reward": torch.randn(rows, columns, dtype=torch.float64)}
    batch |= {key: torch.zeros(rows, columns, dtype=torch.bool) for key in ("terminated", "is_first")}
    for column in range(1, columns):
        end = 1 + column % (rows - 2)
        batch["valid"][end, column], batch["terminated"][end - 1, column] = False, column % 2 == 0
    return batch


def drawing(numbers):
    def draw(high: int, count: int):
        assert (high, count) == (4, len(numbers))
        return numbers

    return draw


def test_each_window_has_its_own_number():
    columns, gamma = 4 * 6, 0.7
    batch, drawn = uneven(6, columns), torch.arange(columns) % 4  # every number with every end
    out = n_step_transitions(batch, gamma, (2, 5), drawing(drawn))
    for b in range(columns):
        total, discount, last = by_hand(batch, 0, b, 2 + int(drawn[b]), gamma)
        assert_close(out["returns"][b].item(), total, rtol=1e-12, atol=1e-12)
        assert_close(out["discount"][b].item(), discount, rtol=1e-12, atol=1e-12)
        assert out["next_obs"]["place"][b].tolist() == [last, b]


@pytest.mark.parametrize("burn_in", [0, 2])
def test_each_sequence_has_its_own_number(burn_in):
    columns, gamma, length = 4 * 6, 0.7, 3
    batch, drawn = uneven(burn_in + length + 5, columns), torch.arange(columns) % 4
    out = n_step_sequences(batch, gamma, (2, 5), burn_in, drawing(drawn))
    assert out["last"].shape == (length, columns)
    for b in range(columns):
        for t in range(length):
            total, discount, last = by_hand(batch, burn_in + t, b, 2 + int(drawn[b]), gamma)
            found = (out[key][t, b].item() for key in ("returns", "discount"))
            assert_close(tuple(found), (total, discount), rtol=1e-12, atol=1e-12)
            assert out["last"][t, b] == last - burn_in


def test_agents_of_a_sequence_share_its_number():
    columns, agents, gamma = 4, 3, 0.7
    batch = uneven(7, columns * agents)
    of_agents = (batch[key].view(7, columns, agents) for key in ("reward", "terminated", "valid"))
    ret, discount, last = n_step_rows(*of_agents, gamma, (2, 5), drawing(torch.arange(4)))
    for b in range(columns):
        for agent in range(agents):
            expected = by_hand(batch, 0, b * agents + agent, 2 + b, gamma)
            found = (x[0, b, agent].item() for x in (ret, discount, last))
            assert_close(tuple(map(float, found)), tuple(map(float, expected)), rtol=1e-12, atol=1e-12)


def test_without_draws_a_range_is_its_maximum():
    batch = uneven(9, 5)
    for some, others in (
        (n_step_transitions(batch, 0.7, (2, 8)), n_step_transitions(batch, 0.7)),
        (n_step_sequences(batch, 0.7, (2, 5)), n_step_sequences(batch, 0.7, 5)),
        (n_step_segment(batch, 0.7, (2, 5)), n_step_segment(batch, 0.7, 5)),
    ):
        assert all(torch.equal(some[key], others[key]) for key in ("returns", "discount"))


def test_the_longest_of_a_range_is_its_second_number():
    assert [longest(n) for n in (3, (1, 5), (4, 4))] == [3, 5, 4]
    with pytest.raises(ConfigError) as refused:
        longest((5, 1))
    assert (refused.value.key, refused.value.message) == (
        "algo.n_step",
        "[5, 1] is no range; the first number should be the smaller one",
    )

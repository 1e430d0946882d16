"""Rounds of one row count what one long segment does."""

from __future__ import annotations

import torch

from rlplug import tree
from rlplug.collection.episodes import EpisodeStats


def test_segments_of_one_row_count_what_a_long_one_does():
    rows, columns, generator = 60, 3, torch.Generator().manual_seed(0)
    ends = torch.rand(2, rows + 1, columns, generator=generator) < 0.1
    over = ends[0] | ends[1]
    valid = torch.ones(rows + 1, columns, dtype=torch.bool)
    valid[1:] = ~over[:-1]  # the row behind an end is its final observation
    first = torch.ones_like(valid)
    first[1:] = ~valid[:-1]
    reward = torch.rand(rows + 1, columns, generator=generator)
    stream = {"valid": valid, "is_first": first, "reward": reward, "terminated": ends[0], "truncated": ends[1]}
    whole, single = EpisodeStats(columns), EpisodeStats(columns)
    steps = whole.add(stream)
    assert sum(single.add(tree.take(stream, slice(t, t + 2))) for t in range(rows)) == steps
    one, other = whole.drain(), single.drain()
    assert len(one) > 5
    assert [(n, env) for _, n, env in one] == [(n, env) for _, n, env in other]
    torch.testing.assert_close(torch.tensor([r for r, *_ in one]), torch.tensor([r for r, *_ in other]))

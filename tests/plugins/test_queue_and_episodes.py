"""Buffers whose samples are segments in order, and whole episodes; streams and checkpoints are the kit's checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlplug import tree
from rlplug.api import Needs, Segment
from rlplug.checkpointing.format import FileRowLog
from rlplug.functional.returns import ended
from rlplug.testing.checks.runs import differences
from rlplug.testing.context import spec
from rlplug.types import ConfigError, RunError
from tests.collection.test_agents import COLUMNS, ENVS, source
from tests.plugins.test_buffers import make as made


def make(name, columns=2, batch=8, rows=4, off_policy=False, **more):
    needs = Needs(data="segments" if name == "queue" else "episodes", off_policy=off_policy, keys=("obs", "action"))
    return made(name, needs, columns, batch, rows=rows, **more)


def rows(number, **flags):
    """A segment's rows ``[T+1, B]`` that say ``number``."""
    number = torch.as_tensor(number)
    batch = {key: torch.zeros(number.shape, dtype=torch.bool) for key in ("terminated", "truncated", "is_first")}
    batch |= {"valid": torch.ones(number.shape, dtype=torch.bool)} | {
        key: torch.as_tensor(x) for key, x in flags.items()
    }
    batch["valid"] = batch["valid"].clone()
    batch["valid"][-1] = False
    return batch | {"obs": number[..., None].float().repeat(1, 1, 4), "action": number, "reward": number.float()}


def numbered(start, columns=2, length=4):
    return rows(torch.arange(start * 10, start * 10 + length + 1)[:, None] + 1000 * torch.arange(columns))


# ---- queue ---------------------------------------------------------------------------------------------------------


def test_the_oldest_segments_side_by_side_with_their_versions_each_once():
    queue = make("queue", columns=3, batch=8)
    queue.add(Segment(numbered(0, 1), slice(0, 1), 0, version=5))
    assert not queue.ready()
    queue.add(Segment(numbered(1, 2), slice(1, 3), 1, version=7))
    queue.add(Segment(numbered(2, 1), slice(0, 1), 0, version=8))
    sample = queue.sample()
    assert sample["action"][0].tolist() == [0, 10, 1010]
    assert sample["version"].tolist() == [5, 7, 7]
    assert sample["version"].dtype == torch.int64
    assert not queue.ready()
    queue.add(Segment(numbered(3, 1), slice(0, 1), 0, version=9))
    assert queue.sample()["action"][0].tolist() == [20, 30]


def test_a_queue_that_is_full_drops_the_oldest_and_counts_it():
    queue, store = make("queue", capacity=3), FileRowLog()
    for start in range(5):
        queue.add(Segment(numbered(start), version=start))
    assert queue.metrics() == {"dropped_segments": 2}
    queue.save(store)
    loaded = make("queue", capacity=3)
    loaded.load(store)
    assert loaded.metrics() == {"dropped_segments": 2}
    for of in (queue, loaded):
        assert [of.sample()["version"].tolist() for _ in range(3)] == [[2, 2], [3, 3], [4, 4]]
        assert not of.ready()


def test_a_segment_is_stored_once_by_however_many_checkpoints():
    queue, store = make("queue"), FileRowLog()
    for start in range(4):
        queue.add(Segment(numbered(start)))
        queue.save(store)
    assert [(chunk.start, chunk.end) for chunk in store.chunks] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    queue.sample()
    queue.save(store)
    assert [chunk.start for chunk in store.chunks] == [1, 2, 3]


def test_a_queue_that_holds_no_sample_is_refused():
    with pytest.raises(ConfigError, match=r"buffer\.capacity: 2 segments of 2 environments hold 16.*at least 4 is"):
        make("queue", batch=32, capacity=2)
    with pytest.raises(ConfigError, match=r"buffer\.capacity: 2 segments of 1 environments hold 8.*at least 4 is"):
        make("queue", batch=16, capacity=2, shards=2)


def test_segments_of_shards_take_their_share_of_memory():
    row = {"obs": torch.zeros(2, 4)}
    assert make("queue", capacity=6).nbytes(row) == 2 * make("queue", capacity=6, shards=2).nbytes(row)


@pytest.mark.parametrize(("proportion", "replayed"), [(0.5, [0, 1, 0, 1]), (1.0, [1, 1, 1, 1]), (2.0, [2, 2, 2, 2])])
def test_used_segments_are_replayed_in_proportion(proportion, replayed):
    queue = make("queue", off_policy=True, replay_proportion=proportion, replay_capacity=2)
    queue.add(Segment(numbered(0), version=0))
    assert queue.sample()["version"].tolist() == [0, 0], "nothing has been used yet"
    for version, count in enumerate(replayed, 1):
        queue.add(Segment(numbered(version), version=version))
        sample = queue.sample()
        assert sample["version"][:2].tolist() == [version] * 2
        old = sample["version"][2::2].tolist()
        assert len(old) == count
        assert set(old) <= {version - 1, version - 2}, "the newest that were used"
        for column, number in enumerate(old):
            assert sample["action"][0, 2 + 2 * column] == 10 * number


# ---- episodes ------------------------------------------------------------------------------------------------------


def stream(ends, length, seed=0):
    """Rows of one column each: episodes of the given lengths, again and again; final rows are not valid."""
    number = np.arange(length)
    first, valid, ended = np.zeros(length, bool), np.ones(length, bool), np.zeros(length, bool)
    at, episodes, turn = 0, [], 0
    while at < length:
        first[at] = True
        steps = ends[turn % len(ends)]
        if at + steps < length:
            valid[at + steps], ended[at + steps - 1] = False, True
            episodes.append(list(range(at, at + steps + 1)))
        at, turn = at + steps + 1, turn + 1
    return number, first, valid, ended, episodes


def segments(columns, size, until):
    """Segments of ``size`` transitions, by their last row."""
    parts = [np.stack(leaf, 1) for leaf in zip(*(column[:4] for column in columns), strict=True)]
    for start in range(0, until - size, size):
        number, first, valid, ended = (leaf[start : start + size + 1].copy() for leaf in parts)
        ended[-1] = False  # what follows from an action of row T is not known yet
        key = ("terminated", "truncated")[start % 2]
        number = number + 1000 * np.arange(len(columns))
        yield start + size, Segment(rows(number, is_first=first, valid=valid, **{key: ended}))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_each_episode_is_given_once_and_whole(size):
    columns = [stream(ends, 100) for ends in ((3, 1, 7), (5,), (2, 2, 9))]
    buffer, got = make("episodes", columns=3, batch=4, rows=size, capacity=200), []
    for end, part in segments(columns, size, 100):
        buffer.add(part)
        known = [[1000 * b + i for i in e] for b, c in enumerate(columns) for e in c[4] if e[-1] <= end]
        assert len(buffer) == len(known) - len(got), "an episode is there as soon as its final observation is"
        if not buffer.ready():
            continue
        sample = buffer.sample()
        assert sample["is_first"][0].all()
        assert not sample["is_first"][1:][sample["valid"][1:]].any()
        for number, valid in zip(sample["action"].T.tolist(), sample["valid"].T.tolist(), strict=True):
            steps = sum(valid)
            assert valid == [True] * steps + [False] * (len(valid) - steps)
            assert set(number[steps:]) == {number[steps]}, "padded with the final observation"
            got.append(number[: steps + 1])
        assert sorted(got) == sorted(known)
    assert len(got) > 20
    assert buffer.metrics() == {"dropped_episodes": 0}


def test_rows_that_wait_for_other_columns_are_left_out():
    number = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3, 4])[:, None]  # what same-step collectors pad with
    valid = torch.tensor([False, False, True, True, False, False, True, True, False])[:, None]
    first = torch.tensor([True, True, True, *[False] * 6])[:, None]
    ended = torch.tensor([*[False] * 7, True, False])[:, None]
    buffer = make("episodes", columns=1, batch=1)
    buffer.add(Segment(rows(number, is_first=first, terminated=ended, valid=valid)))
    assert buffer.sample()["action"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_an_episode_that_broke_off_and_one_without_a_beginning_are_left_out():
    number = torch.arange(9)[:, None]
    first = torch.tensor([False, False, True, False, False, True, False, False, False])[:, None]
    ended = torch.tensor([True, False, False, False, False, False, True, False, False])[:, None]
    valid = torch.tensor([True, False, True, True, False, True, True, False, False])[:, None]
    buffer = make("episodes", columns=1, batch=1)
    buffer.add(Segment(rows(number, is_first=first, truncated=ended, valid=valid)))
    assert len(buffer) == 1
    assert buffer.sample()["action"][:, 0].tolist() == [5, 6, 7]
    assert buffer.metrics() == {"dropped_episodes": 1}


def test_an_off_policy_algorithm_draws_uniformly_from_what_fits():
    buffer = make("episodes", columns=2, batch=500, off_policy=True, capacity=60)
    columns = [stream((3, 4), 400), stream((5,), 400)]
    for _, part in segments(columns, 4, 400):
        buffer.add(part)
    kept = sum(len(e["valid"]) for e in buffer._episodes) + buffer._open_rows.sum()
    assert 60 - 6 <= kept <= 60
    drawn = torch.cat([buffer.sample()["index"] for _ in range(40)])
    counts = drawn.bincount()[buffer._first :]
    assert len(counts) == len(buffer)
    assert ((counts / counts.sum() * len(buffer) - 1).abs() < 0.1).all()
    assert buffer.metrics() == {"dropped_episodes": 0}, "what is replaced was not lost unused"
    sample = buffer.sample()
    torch.testing.assert_close(sample["sample_prob"], torch.full((500,), 1 / len(buffer)))


def test_episodes_that_do_not_fit_are_refused_or_stop_the_run():
    of = replace(spec(), max_episode_steps=50)
    with pytest.raises(ConfigError, match=r"buffer\.capacity: 500 does not hold.*at least 510 is needed"):
        make("episodes", columns=2, batch=8, of=of, capacity=500)
    buffer = make("episodes", columns=1, batch=1, capacity=20)
    parts = [part for _, part in segments([stream((1000,), 100)], 4, 100)]
    for part in parts[:5]:
        buffer.add(part)
    with pytest.raises(RunError, match=r"buffer\.capacity=20.*one has 24 steps and has not ended"):
        buffer.add(parts[5])


def test_unused_episodes_that_are_dropped_are_counted():
    buffer = make("episodes", columns=1, batch=4, capacity=30)
    for _, part in segments([stream((5,), 100)], 4, 100):
        buffer.add(part)
    assert buffer.metrics()["dropped_episodes"] == 100 // 6 - len(buffer) > 0


# ---- episodes of agents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("name", ENVS)
def test_episodes_of_agents_are_whole(name, length):
    """An episode ends with its last agent, and not with the first; one group of agents, and several."""
    player, whole = source(name), tree.map(torch.clone, source(name).collect(120))
    buffer, loaded = (make("episodes", columns=COLUMNS, batch=1, of=player.ctx.spec, capacity=5000) for _ in range(2))
    for _ in range(120 // length):
        buffer.add(Segment(tree.map(torch.clone, player.collect(length))))
    log = FileRowLog()
    buffer.save(log)
    loaded.load(log)
    sample = buffer.sample()
    assert not differences(sample, loaded.sample())
    sample = {key: x for key, x in sample.items() if key not in ("index", "sample_prob")}

    def bits(rows, index):
        rows = tree.take(rows, index)
        return tuple(leaf.numpy().tobytes() for path, leaf in sorted(tree.items(rows)) if path != ("valid",))

    kept = Counter(bits(sample, (slice(0, int(n) + 1), i)) for i, n in enumerate(sample["valid"].sum(0)))
    expected, last = Counter(), 120 // length * length
    for end, column in ended(whole)[: last - 1].nonzero().tolist():  # a final observation in row T is taken later
        begin = int(whole["is_first"][: end + 1, column].nonzero().max())
        expected[bits(whole, (slice(begin, end + 2), column))] += 1
    assert expected.total() > 8
    assert expected <= kept
    assert kept.total() - expected.total() <= COLUMNS


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ("segments", {"waiting": [0]}),
        ("segments", {"waiting": [[0], 1]}),
        ("segments", {"used": [0]}),
        ("segments", {"owed": [1]}),
        ("rollout", {"valid": 1}),
        ("rollout", [[1]]),
        ("rollout", [{"obs": 1}]),
    ],
)
def test_segments_that_were_not_saved_are_refused(data, wrong):
    name = {"segments": "queue", "rollout": "rollout"}[data]
    needs = Needs(data=data, off_policy=data == "segments", keys=("obs", "action"))

    def build():
        return made(name, needs, 2, 8, rows=4)

    buffer, log = build(), FileRowLog()
    for number in range(2):
        buffer.add(Segment(numbered(number), version=number))
    buffer.save(log)
    build().load(log)
    log.state = log.state | wrong if data == "segments" else wrong
    with pytest.raises((ValueError, TypeError)):
        build().load(log)

"""The ring of batches: each is used so many times, in turn, or leaves when it is the oldest."""

from __future__ import annotations

import pytest

from rlplug.api import Needs, Segment
from rlplug.checkpointing.format import FileRowLog
from rlplug.config import choose, default_node
from rlplug.testing.checks.runs import differences
from rlplug.testing.context import context
from rlplug.types import RunError
from tests.plugins.test_queue_and_episodes import numbered


def make(columns=2, batch=8, rows=4, **changes):
    needs = Needs(data="segments", off_policy=True, keys=("obs", "action"))
    ctx = context(needs=needs, num_envs=columns, rollout_length=rows, batch_size=batch)
    return choose("buffer", "buffer", default_node("buffer", "circular") | changes).build(ctx)


def given(ring) -> int:
    """The number of the segment, or of the first of several, that a sample begins with."""
    return ring.sample()["action"][0, 0].item() // 10


def test_every_batch_is_used_so_many_times_in_turn():
    ring, samples = make(num_batches=3, num_uses=2), []
    for number in range(12):
        ring.add(Segment(numbered(number), version=number))
        assert ring.ready() or number < 2, "it is ready once it is full"
        while ring.ready():
            samples.append(given(ring))
        samples.append("|")
    assert samples[:11] == ["|", "|", 0, 1, 2, 0, "|", 1, "|", 2, "|"]
    used = [number for number in samples if number != "|"]
    assert all(used.count(number) == 2 for number in range(9))
    assert ring.metrics() == {"dropped_batches": 0}


def test_one_that_is_the_oldest_makes_room():
    ring = make(num_batches=2, num_uses=3)
    for number in range(3):
        ring.add(Segment(numbered(number), version=number))
    assert ring.metrics() == {"dropped_batches": 1}
    assert [given(ring) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert not ring.ready(), "the first has left after its third use"
    ring.add(Segment(numbered(3), version=3))
    assert [given(ring), given(ring)] == [2, 3]
    assert ring.metrics() == {"dropped_batches": 1}


def test_a_batch_is_made_of_several_segments_of_shards():
    ring = make(columns=3, batch=8, num_batches=1, num_uses=1)
    ring.add(Segment(numbered(0, 1), slice(0, 1), 0, version=5))
    assert not ring.ready()
    ring.add(Segment(numbered(1, 2), slice(1, 3), 1, version=7))
    sample = ring.sample()
    assert sample["action"][0].tolist() == [0, 10, 1010]
    assert sample["version"].tolist() == [5, 7, 7]
    assert not ring.ready()


def test_a_loaded_ring_goes_on_in_turn():
    ring, store = make(num_batches=3, num_uses=2), FileRowLog()
    for number in range(3):
        ring.add(Segment(numbered(number), version=number))
    ring.sample()
    ring.save(store)
    loaded = make(num_batches=3, num_uses=2)
    loaded.load(store)
    for number in range(3, 9):
        while ring.ready():
            assert loaded.ready()
            assert not differences(ring.sample(), loaded.sample())
        assert not loaded.ready()
        for of in (ring, loaded):
            of.add(Segment(numbered(number), version=number))
    assert loaded.metrics() == ring.metrics()


def test_a_segment_is_stored_once_by_however_many_checkpoints():
    ring, store = make(num_batches=2), FileRowLog()
    for number in range(4):
        ring.add(Segment(numbered(number)))
        ring.save(store)
    assert [(chunk.start, chunk.end) for chunk in store.chunks] == [(2, 3), (3, 4)]


def test_what_is_fed_back_is_refused():
    with pytest.raises(RunError, match="'priority' was fed back to the buffer circular"):
        make().feedback(None, {"priority": None})

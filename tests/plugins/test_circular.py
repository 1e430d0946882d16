"""The ring of batches: each is used so many times, in turn, or leaves when it is the oldest."""

from __future__ import annotations

import pytest

from rlplug.api import Needs, Segment
from rlplug.checkpointing.format import FileRowLog
from tests.plugins.test_buffers import make as of
from tests.plugins.test_queue_and_episodes import numbered


def make(columns=2, **changes):
    needs = Needs(data="segments", off_policy=True, keys=("obs", "action"))
    return of("circular", needs, columns, 8, rows=4, **changes)


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
    ring = make(columns=3, num_batches=1, num_uses=1)
    ring.add(Segment(numbered(0, 1), slice(0, 1), 0, version=5))
    assert not ring.ready()
    ring.add(Segment(numbered(1, 2), slice(1, 3), 1, version=7))
    sample = ring.sample()
    assert sample["action"][0].tolist() == [0, 10, 1010]
    assert sample["version"].tolist() == [5, 7, 7]
    assert not ring.ready()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("waiting", [0]), ("waiting", [[0]]), ("ring", []), ("ring", [([0, 7], 0)]), ("versions", []), ("end", 0)],
)
def test_segments_that_were_not_saved_are_refused(name, wrong):
    ring, log = make(num_batches=2, num_uses=2), FileRowLog()
    for number in range(2):
        ring.add(Segment(numbered(number), version=number))
    ring.save(log)
    make(num_batches=2, num_uses=2).load(log)
    log.state = log.state | {name: wrong}
    with pytest.raises((ValueError, TypeError)):
        make(num_batches=2, num_uses=2).load(log)

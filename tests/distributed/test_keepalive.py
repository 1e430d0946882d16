"""A lost rank of several machines is noticed, also where no collective would report it."""

from __future__ import annotations

import os
import platform
import queue
import threading
from contextlib import ExitStack, suppress
from unittest import mock

import pytest

from rlplug.api import Plan
from rlplug.distributed import keepalive, spawn
from rlplug.distributed.keepalive import watch_ranks
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.testing.rank_pool import ranks

LOST = "rank {} ({}) does not answer: it has ended, or its machine or network is down"


def impatient(fabric, on_lost) -> ExitStack:
    """Watch the ranks with short intervals."""
    stack = ExitStack()
    for name, seconds in (("BEAT_S", 0.05), ("SILENCE_S", 1.0)):
        stack.enter_context(mock.patch.object(keepalive, name, seconds))
    stack.enter_context(watch_ranks(fabric, on_lost))
    return stack


def dies(fabric, tell):
    reasons = queue.Queue()
    with impatient(fabric, reasons.put):
        if fabric.global_rank == 1:
            os._exit(0)
        tell(reasons.get())


def raises(fabric, who):
    """Its process lives on, and the other rank is in no collective: nothing else would notice."""
    reasons = queue.Queue()
    with suppress(ArithmeticError), impatient(fabric, reasons.put):
        if fabric.global_rank == who:
            raise ArithmeticError
        return reasons.get()


def leaves(fabric, who):
    reasons = queue.Queue()
    with impatient(fabric, reasons.put):
        if fabric.global_rank != who:
            threading.Event().wait(2.0)
            assert reasons.empty()


def test_a_rank_whose_process_ends():
    lines: list[str] = []
    # the launcher notices as well: it must not end the other rank before that one could say so
    patience = mock.patch.object(spawn, "GRACE_S", 30.0)
    with patience, pytest.raises(RankError, match="the process of rank 1 of 2 was ended with code 0"):
        spawn_ranks(Plan("cpu", 2), dies, tell=lines.append)
    assert lines == [LOST.format(1, platform.node())]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails(who: int):
    assert ranks(2)(raises, who)[1 - who] == LOST.format(who, platform.node())


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_is_not_lost(who: int):
    ranks(2)(leaves, who)

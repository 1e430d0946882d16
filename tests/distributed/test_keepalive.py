"""A lost rank of several machines is noticed, also where no collective would report it."""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from unittest import mock

import pytest

from rlplug.api import Plan
from rlplug.distributed import keepalive, spawn
from rlplug.distributed.keepalive import watch_ranks
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.testing.rank_pool import ranks


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def dies(fabric, tell):
    reasons = queue.Queue()
    with watch_ranks(fabric, reasons.put):
        if fabric.global_rank == 1:
            os._exit(0)
        tell(reasons.get())


def raises(fabric, who):
    """Its process lives on, and the other rank is in no collective: nothing else would notice."""
    reasons = queue.Queue()
    with suppress(ArithmeticError), watch_ranks(fabric, reasons.put):
        if fabric.global_rank == who:
            raise ArithmeticError
        return reasons.get()


def leaves(fabric, who):
    reasons = queue.Queue()
    with watch_ranks(fabric, reasons.put):
        if fabric.global_rank != who:
            for watcher in watchers():
                watcher.join()
            assert reasons.empty()


def connects_first(fabric):
    """Another program connects to the port that is opened for ranks."""
    create = socket.create_server

    def visited(*args, **kwargs):
        server = create(*args, **kwargs)
        socket.create_connection(("127.0.0.1", server.getsockname()[1])).sendall(b"x" * 20)
        return server

    with mock.patch.object(socket, "create_server", visited), watch_ranks(fabric, print):
        names = [watcher.name for watcher in watchers()]
        fabric.barrier()
        return names


def test_a_rank_whose_process_ends():
    lines: list[str] = []
    # the launcher notices as well: it must not end the other rank before that one could say so
    patience = mock.patch.object(spawn, "GRACE_S", 10 * keepalive.GRACE_S)
    with patience, pytest.raises(RankError, match="the process of rank 1 of 2 was ended with code 0"):
        spawn_ranks(Plan("cpu", 2), dies, tell=lines.append)
    assert lines == ["rank 1 (127.0.0.1) has ended"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails(who: int):
    assert ranks(2)(raises, who)[1 - who] == f"rank {who} (127.0.0.1) has ended"


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_is_not_lost(who: int):
    ranks(2)(leaves, who)


def test_another_program_is_no_rank():
    assert ranks(2)(connects_first) == [["rank 1 (127.0.0.1)"], ["rank 0 (127.0.0.1)"]]

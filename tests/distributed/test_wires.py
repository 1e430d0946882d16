"""Ranks of several machines miss one another, also where no collective would say so."""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from unittest import mock

import pytest

from rlplug.api import Plan
from rlplug.distributed import wires
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.testing.rank_pool import ranks


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def dies(fabric, tell):
    heard = queue.Queue()
    with wires.listening(fabric, heard.put):
        if fabric.global_rank == 1:
            os._exit(0)
        tell(heard.get())


def raises(fabric, who):
    """It lives on, and the other one is in no collective: nothing else would be noticed."""
    heard = queue.Queue()
    with suppress(ArithmeticError), wires.listening(fabric, heard.put):
        if fabric.global_rank == who:
            raise ArithmeticError
        return heard.get()


def leaves(fabric, who):
    heard = queue.Queue()
    with wires.listening(fabric, heard.put):
        if fabric.global_rank != who:
            for listener in listeners():
                listener.join()
            assert heard.empty()


def calls_first(fabric):
    """A stranger does, at the port that is opened for ranks."""
    create = socket.create_server

    def visited(*args, **kwargs):
        server = create(*args, **kwargs)
        socket.create_connection(("127.0.0.1", server.getsockname()[1])).sendall(b"x" * 20)
        return server

    with mock.patch.object(socket, "create_server", visited), wires.listening(fabric, print):
        names = [listener.name for listener in listeners()]
        fabric.barrier()
        return names


def test_one_whose_process_ends():
    told: list[str] = []
    with pytest.raises(RankError, match="the process of rank 1 of 2 was ended with code 0"):
        spawn_ranks(Plan("cpu", 2), dies, tell=told.append)
    assert told == ["rank 1 (127.0.0.1) has ended"]


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_failed(who: int):
    assert ranks(2)(raises, who)[1 - who] == f"rank {who} (127.0.0.1) has ended"


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_is_done_is_not_missed(who: int):
    ranks(2)(leaves, who)


def test_a_stranger_is_no_rank():
    assert ranks(2)(calls_first) == [["rank 1 (127.0.0.1)"], ["rank 0 (127.0.0.1)"]]

"""A pool of rank processes that many tests share."""

from __future__ import annotations

import pickle
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing

from rlplug import registry
from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.plan import Plan
from rlplug.testing.limits import IMPORTED, UNGUARDED


class Ranks:
    """Several CPU ranks: ``ranks(function, *args)`` runs ``function(fabric, *args)`` on each of them.

    Functions are pickled by name, so they must be in importable modules. Starting takes seconds, a call milliseconds.

    Args:
        n: number of ranks.
        patience: seconds after which a call fails.
    """

    def __init__(self, n: int, patience: float = 300.0) -> None:
        self.patience = patience
        port, spawn = free_port(), multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(n)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [
            spawn.Process(target=_serve, args=(rank, n, port, theirs), name=f"rank {rank}", daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function`` returns on each rank.

        Raises:
            RuntimeError: a rank raised (the message has the traceback) or did not answer; all ranks are then ended.
        """
        try:
            return self._call(function, args)
        except BaseException:  # also of a time limit: late answers would be mistaken for those of another call
            self.close()
            raise

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for rank, end in enumerate(self.ends):
            try:
                end.send_bytes(pickle.dumps((list(sys.path), function, args)))
            except OSError:
                raise RuntimeError(f"rank {rank} of {len(self.ends)} failed:\n{self._end_of(rank)}") from None
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.patience
        while len(answers) < len(self.ends):
            for rank, end in enumerate(self.ends):
                if rank not in answers and end.poll(0.01):
                    succeeded, answer = self._receive(rank)
                    if not succeeded:
                        raise RuntimeError(f"rank {rank} of {len(self.ends)} failed:\n{answer}")
                    answers[rank] = answer
            if time.monotonic() > deadline:
                raise RuntimeError(f"only the ranks {sorted(answers)} of {len(self.ends)} answered")
        return [answers[rank] for rank in range(len(self.ends))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.ends[rank].recv_bytes())
        except (EOFError, OSError):
            return False, self._end_of(rank)

    def _end_of(self, rank: int) -> str:
        self.processes[rank].join(10.0)
        return UNGUARDED if self.processes[rank].exitcode == IMPORTED else "its process died"

    def close(self) -> None:
        ranks.cache_clear()
        for process in self.processes:
            process.terminate()


@cache
def ranks(n: int) -> Ranks:
    """Return ``n`` ranks, which live as long as this process."""
    return Ranks(n)


def _serve(rank: int, n: int, port: int, end: Connection) -> None:
    torch.set_num_threads(1)
    set_rank_env(rank, n, port)
    fabric = fabric_of(Plan("cpu", n))
    while True:
        try:
            call = end.recv_bytes()
        except EOFError:  # the parent is gone
            return
        try:
            sys.path[:], function, args = pickle.loads(call)
            registry.refresh()  # the path may have other plugins
            answer = True, function(fabric, *args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))

"""A few ranks that are kept, to be asked many times."""

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

from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.plan import Plan


class Ranks:
    """``ranks(function, *args)`` is what ``function(fabric, *args)`` returns on each of them.

    Functions are pickled by name: they live in importable modules. Starting costs seconds, a call milliseconds.

    Args:
        n: how many.
        patience: seconds after which a rank that does not answer is given up.
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
        """Raises:
        RuntimeError: a rank raised, with its traceback; the ranks are ended, for the others would wait for it.
        """
        for end in self.ends:
            end.send_bytes(pickle.dumps((list(sys.path), function, args)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.patience
        while len(answers) < len(self.ends):
            for rank, end in enumerate(self.ends):
                if rank not in answers and end.poll(0.01):
                    fine, answer = self._receive(end)
                    if not fine:
                        self.close()
                        raise RuntimeError(f"rank {rank} of {len(self.ends)} failed:\n{answer}")
                    answers[rank] = answer
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"only the ranks {sorted(answers)} of {len(self.ends)} answered: the others wait")
        return [answers[rank] for rank in range(len(self.ends))]

    def _receive(self, end: Connection) -> tuple[bool, Any]:
        try:
            return pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            return False, "its process died"

    def close(self) -> None:
        ranks.cache_clear()
        for process in self.processes:
            process.terminate()


@cache
def ranks(n: int) -> Ranks:
    """The ranks of this process, kept until it ends."""
    return Ranks(n)


def _serve(rank: int, n: int, port: int, end: Connection) -> None:
    torch.set_num_threads(1)
    set_rank_env(rank, n, port)
    fabric = fabric_of(Plan("cpu", n))
    while True:
        try:
            question = end.recv_bytes()
        except EOFError:  # who asked is gone
            return
        try:
            sys.path[:], function, args = pickle.loads(question)
            answer = True, function(fabric, *args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))

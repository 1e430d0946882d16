"""The ranks of one machine, as processes of their own.

They get a function by its name and picklable arguments, never the command line of whoever starts them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias

from torch import multiprocessing

from rlplug.distributed.fabric import fabric_of, free_port, set_rank_env
from rlplug.distributed.signals import handling, masking
from rlplug.plan import Plan
from rlplug.types import ConfigError, RunError

GRACE = 3.0
"""seconds in which ranks whose neighbour is gone may say their last word"""

Kind = Literal["value", "told", "error", "interrupted", "traceback", "died"]
Answer: TypeAlias = tuple[Kind, Any, float]
"""what a rank said, and when: processes of one machine have the same clock"""


class RankError(RunError):
    """A rank raised, or its process died."""


def spawn_ranks(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """``function(fabric, tell, *args)`` on every rank of ``plan``, in processes of their own on this machine.

    Ctrl-C and SIGTERM reach all of them. When one fails, or at a second Ctrl-C, all end within seconds.

    Returns:
        What the first rank returned.

    Raises:
        ConfigError, RunError, KeyboardInterrupt: the one that was raised first.
        RankError: a rank raised anything else, with its traceback, or died.
    """
    port, spawn = free_port(), multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(plan.devices)]
    question = list(sys.path), function, args
    processes = [
        spawn.Process(target=_work, args=(rank, plan, port, theirs, question), name=f"rank {rank}")
        for rank, (_, theirs) in enumerate(pipes)
    ]

    heard: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        heard.append(number)
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    resource_tracker.ensure_running()  # of multiprocessing, which unblocks signals when it starts
    try:
        with ExitStack() as passing:
            with masking(signal.SIG_BLOCK):  # which processes inherit: a rank hears them once it can answer
                passing.enter_context(handling(pass_on))
                for process in processes:
                    process.start()
            ends = [ours for ours, theirs in pipes if theirs.close() is None]
            answers = _listen(ends, tell, lambda: heard.count(signal.SIGINT) > 1)
    finally:
        _end(processes)
    return _verdict(answers, processes)


def _listen(ends: list[Connection], tell: Callable[[str], None], insists: Callable[[], bool]) -> dict[int, Answer]:
    """What every rank said last; after the first failure, or once somebody ``insists``, for a few seconds only: one
    that waits for another inside of a collective hears no signal."""
    answers: dict[int, Answer] = {}
    deadline: float | None = None
    while len(answers) < len(ends) and (deadline is None or time.monotonic() < deadline):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in answers}
        if deadline is None and insists():
            deadline = time.monotonic() + GRACE
        for end in wait(list(waiting), 0.5):
            try:
                answer: Answer = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # its neighbours may have said sooner that it is gone than it was noticed here
                answer = "died", None, time.monotonic() - GRACE
            if answer[0] == "told":
                tell(answer[1])
                continue
            answers[waiting[end]] = answer  # type: ignore[index]
            if answer[0] not in ("value", "interrupted") and deadline is None:  # a stopped one's neighbours stop too
                deadline = time.monotonic() + GRACE
    return answers


def _verdict(answers: dict[int, Answer], processes: list[Any]) -> Any:
    """The first rank's value, or what went wrong first; those without an answer waited for whom that happened to."""
    wrong = {rank: answer for rank, answer in answers.items() if answer[0] != "value"}
    if not wrong:
        if 0 not in answers:  # nobody had time to answer
            raise KeyboardInterrupt(signal.SIGINT)
        return answers[0][1]
    for kind, what, _ in wrong.values():
        if kind == "interrupted":
            raise KeyboardInterrupt(what)
    rank = min(wrong, key=lambda rank: wrong[rank][2])
    kind, what, _ = wrong[rank]
    if kind == "error":
        raise what
    if kind == "traceback":
        raise RankError(f"rank {rank} of {len(processes)} failed:\n{what}")
    code = processes[rank].exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    raise RankError(f"the process of rank {rank} of {len(processes)} was ended {how}")


def _work(rank: int, plan: Plan, port: int, end: Connection, question: tuple[list[str], Any, tuple[Any, ...]]) -> None:
    """One rank's process."""
    os.setpgrp()  # a terminal's Ctrl-C reaches whoever started it, who passes it on once
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def say(kind: Kind, what: Any) -> None:
        with suppress(OSError):
            end.send_bytes(pickle.dumps((kind, what, time.monotonic())))

    code = 1
    try:
        sys.path[:], function, args = question
        with handling(_interrupt), masking(signal.SIG_UNBLOCK):
            set_rank_env(rank, plan.devices, port)
            say("value", function(fabric_of(plan), lambda line: say("told", line) if rank == 0 else None, *args))
            code = 0
    except (ConfigError, RunError) as error:
        say("error", error)
    except KeyboardInterrupt as error:
        say("interrupted", error.args[0] if error.args else signal.SIGINT)
    except BaseException:
        say("traceback", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for neighbours that may be gone


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody would hear of it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)


def _end(processes: list[Any]) -> None:
    """Those that have answered end by themselves; the others wait for somebody who is gone."""
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill() if process.is_alive() else None
    for process in processes:
        process.join()

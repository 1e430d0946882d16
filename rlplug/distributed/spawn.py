"""The ranks of one machine, each in a process of its own.

A process is given a function by its name and picklable arguments, never the command line of the program that starts it.
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
from rlplug.distributed.signals import handle_signals, mask_signals
from rlplug.plan import Plan
from rlplug.types import ConfigError, RunError

GRACE_S = 3.0
"""seconds that the other ranks have to report and to end after one has failed"""

Kind = Literal["value", "line", "error", "interrupted", "traceback", "died"]
Message: TypeAlias = tuple[Kind, Any, float]
"""what a rank reports, and when; the processes of one machine share a clock"""


class RankError(RunError):
    """A rank raised an unexpected error, or its process died."""


def spawn_ranks(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """Run ``function(fabric, tell, *args)`` on every rank of ``plan``, in processes of their own on this machine.

    Ctrl-C and SIGTERM are passed on to all ranks. When one rank fails, or at a second Ctrl-C, all end within seconds.

    Returns:
        What the first rank returned.

    Raises:
        ConfigError, RunError, KeyboardInterrupt: the first one that a rank raised.
        RankError: a rank raised anything else (the traceback is in the message), or its process died.
    """
    port, spawn = free_port(), multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(plan.devices)]
    work = list(sys.path), function, args
    processes = [
        spawn.Process(target=_run_rank, args=(rank, plan, port, end, work), name=f"rank {rank}")
        for rank, (_, end) in enumerate(pipes)
    ]
    signals: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        signals.append(number)
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    resource_tracker.ensure_running()  # starting it unblocks signals
    try:
        with ExitStack() as stack:
            with mask_signals(signal.SIG_BLOCK):  # inherited: a rank gets its signals once it can handle them
                stack.enter_context(handle_signals(pass_on))
                for process in processes:
                    process.start()
            for _, end in pipes:
                end.close()
            results = _collect([ours for ours, _ in pipes], tell, lambda: signals.count(signal.SIGINT) > 1)
    finally:
        _end(processes)
    return _outcome(results, processes)


def _collect(pipes: list[Connection], tell: Callable[[str], None], insists: Callable[[], bool]) -> dict[int, Message]:
    """Return the last message of every rank.

    After the first failure, or once ``insists()``, wait a few seconds only: a rank that waits for another one in a
    collective handles no signal.
    """
    results: dict[int, Message] = {}
    deadline: float | None = None
    while len(results) < len(pipes) and (deadline is None or time.monotonic() < deadline):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        if deadline is None and insists():
            deadline = time.monotonic() + GRACE_S
        for pipe in wait(list(waiting), 0.5):
            try:
                message: Message = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # other ranks may have noticed and reported it earlier
                message = "died", None, time.monotonic() - GRACE_S
            if message[0] == "line":
                tell(message[1])
                continue
            results[waiting[pipe]] = message  # type: ignore[index]
            if message[0] not in ("value", "interrupted") and deadline is None:  # an interrupted run ends on all ranks
                deadline = time.monotonic() + GRACE_S
    return results


def _outcome(results: dict[int, Message], processes: list[Any]) -> Any:
    """Return the first rank's value, or raise what failed first; a rank without a result waited for a failed one."""
    failed = {rank: message for rank, message in results.items() if message[0] != "value"}
    if not failed:
        if 0 not in results:  # interrupted before any rank reported
            raise KeyboardInterrupt(signal.SIGINT)
        return results[0][1]
    for kind, content, _ in failed.values():
        if kind == "interrupted":
            raise KeyboardInterrupt(content)
    rank = min(failed, key=lambda rank: failed[rank][2])
    kind, content, _ = failed[rank]
    if kind == "error":
        raise content
    if kind == "traceback":
        raise RankError(f"rank {rank} of {len(processes)} failed:\n{content}")
    code = processes[rank].exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    raise RankError(f"the process of rank {rank} of {len(processes)} was ended {how}")


def _run_rank(rank: int, plan: Plan, port: int, pipe: Connection, work: tuple[list[str], Any, tuple[Any, ...]]) -> None:
    """Run one rank in this process, and end the process."""
    os.setpgrp()  # only the parent gets a terminal's Ctrl-C, and passes it on once
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def report(kind: Kind, content: Any) -> None:
        with suppress(OSError):
            pipe.send_bytes(pickle.dumps((kind, content, time.monotonic())))

    code = 1
    try:
        sys.path[:], function, args = work
        with handle_signals(_interrupt), mask_signals(signal.SIG_UNBLOCK):
            set_rank_env(rank, plan.devices, port)
            tell = (lambda line: report("line", line)) if rank == 0 else (lambda line: None)
            report("value", function(fabric_of(plan), tell, *args))
            code = 0
    except (ConfigError, RunError) as error:
        report("error", error)
    except KeyboardInterrupt as error:
        report("interrupted", error.args[0] if error.args else signal.SIGINT)
    except BaseException:
        report("traceback", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for other ranks, which may be gone


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)


def _end(processes: list[Any]) -> None:
    """Let the processes end by themselves, and kill those that wait for one that is gone."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()

"""Launch of the ranks of one machine, in processes that receive a function and its arguments."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from typing import Any

from torch import multiprocessing

from rlplug.distributed.fabric import explain_collective, fabric_of, free_port, set_rank_env
from rlplug.distributed.signals import handle_signals, mask_signals
from rlplug.plan import Plan
from rlplug.terminal import outlive_readers
from rlplug.types import ConfigError, RunError

GRACE_S = 3.0  # for other ranks to report and end after one has failed
Reports = Iterable[tuple[Any, str, Any, Any]]
"""rank; value, interrupt or error; the content; a key that orders failures of several ranks"""

_report_failure: Callable[[BaseException], None] | None = None  # reports to the launcher, in the process of a rank


class RankError(RunError):
    """A rank raised an unexpected error, or its process died."""


@contextmanager
def last_words() -> Iterator[None]:
    """Report an error to the launcher before this rank closes resources that other ranks depend on, such as Ray."""
    try:
        yield
    except Exception as error:
        if _report_failure is not None:
            _report_failure(error)
        raise


def spawn_ranks(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
    """Run ``function(fabric, tell, *args)`` on every rank of ``plan``, in separate processes on this machine.

    Ctrl-C and SIGTERM are forwarded to all ranks. When a rank fails, or at a second Ctrl-C, all end within seconds.

    Returns:
        The result of rank 0.

    Raises:
        ConfigError, RunError, KeyboardInterrupt: the first one raised by a rank.
        RankError: a rank raised another error (its traceback is in the message), or its process died.
    """
    port, spawn = free_port(), multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(plan.devices)]
    work = list(sys.path), function, args
    processes = [
        spawn.Process(target=_run_rank, args=(rank, plan, port, end, work), name=f"rank {rank}")
        for rank, (_, end) in enumerate(pipes)
    ]
    ranks = {ours: rank for rank, (ours, _) in enumerate(pipes)}
    signals: list[int] = []

    def poll(waiting: list[Any]) -> Reports:
        for pipe in wait(waiting, 0.5):
            kind, content, when = _receive(pipe, processes, ranks[pipe])  # type: ignore[index]
            if kind == "line":
                tell(content)
            else:
                yield pipe, kind, content, when

    def pass_on(number: int, frame: Any) -> None:
        signals.append(number)
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    resource_tracker.ensure_running()  # because its start unblocks signals
    try:
        with ExitStack() as stack:
            with mask_signals(signal.SIG_BLOCK):  # inherited, so a rank receives signals once it can handle them
                stack.enter_context(handle_signals(pass_on))
                for process in processes:
                    process.start()
            for _, end in pipes:
                end.close()
            return outcome(dict(ranks), poll, lambda: signals.count(signal.SIGINT))
    finally:
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # it may wait for a dead rank
            process.join()


def outcome(waiting: dict[Any, int], poll: Callable[[list[Any]], Reports], signals: Callable[[], int]) -> Any:
    """Return the result of rank 0, or raise the first failure.

    After the first failure or a second signal, wait only a few seconds, because a rank that waits in a collective
    handles no signals.

    Args:
        waiting: rank by object to poll; ranks that have not reported in time remain.
        poll: waits briefly, and returns reports.
        signals: returns the number of signals sent to the ranks.
    """
    reports: dict[str, dict[int, tuple[Any, Any]]] = {"value": {}, "interrupt": {}, "error": {}}
    deadline = math.inf
    while waiting and time.monotonic() < deadline:
        for one, kind, content, order in poll(list(waiting)):
            reports[kind][waiting.pop(one)] = order, content
        if reports["error"] or signals() > 1:  # after an interrupt, all ranks end by themselves
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failed := reports["interrupt"] or reports["error"]:
        raise min(failed.values(), key=itemgetter(0))[1]
    if 0 not in reports["value"]:  # interrupted before any rank reported
        raise KeyboardInterrupt(signal.SIGINT)
    return reports["value"][0][1]


def _receive(pipe: Any, processes: list[Any], rank: int) -> tuple[str, Any, float]:
    """Return kind, content and time of a rank's report; processes of one machine share a clock."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        when = time.monotonic() - GRACE_S  # other ranks may have reported it earlier
    processes[rank].join(GRACE_S)
    code = processes[rank].exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return "error", RankError(f"the process of rank {rank} of {len(processes)} was ended {how}"), when


def _run_rank(rank: int, plan: Plan, port: int, pipe: Connection, work: tuple[list[str], Any, tuple[Any, ...]]) -> None:
    """Run one rank in this process, then end the process."""
    outlive_readers("stdout", "stderr")
    os.setpgrp()  # a terminal's Ctrl-C reaches only the parent, which forwards it once
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()

    def report(kind: str, content: Any, cause: bool = False) -> None:
        with suppress(OSError):
            pipe.send_bytes(pickle.dumps((kind, content, time.monotonic() - cause * GRACE_S)))

    def failed(error: BaseException) -> None:
        told = isinstance(error, ConfigError | RunError)
        lost = error.__context__ if told else error  # possibly caused by another rank's end
        if not told:
            text = "".join(traceback.format_exception(error))
            error = RankError(f"rank {rank} of {plan.devices} failed:\n{text}")
        report("error", error, cause=lost is None or explain_collective(lost) is None)

    global _report_failure
    _report_failure = failed
    try:
        sys.path[:], function, args = work
        with handle_signals(_interrupt), mask_signals(signal.SIG_UNBLOCK):
            set_rank_env(rank, plan.devices, port)
            tell = (lambda line: report("line", line)) if rank == 0 else (lambda line: None)
            report("value", function(fabric_of(plan), tell, *args))
    except KeyboardInterrupt as error:
        report("interrupt", KeyboardInterrupt(*error.args or (signal.SIGINT,)))
    except BaseException as error:
        failed(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would wait for other ranks, which may be dead


def _end_with(parent: Any) -> None:
    """End this process when its parent ends, which may have happened before this call."""
    parent.join()
    os._exit(1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)

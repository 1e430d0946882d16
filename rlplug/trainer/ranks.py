"""Processes that learn together: those of a run on one machine, and a few that are kept to be asked many times.

Both get a function by its name and picklable arguments, never the command line of whoever starts them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import multiprocessing

from rlplug.api import Plan
from rlplug.types import ConfigError, RunError

PATIENCE = timedelta(hours=2)
"""for which ranks wait for one another: the first one evaluates alone"""
GRACE = 3.0
"""seconds in which ranks whose neighbour is gone may say their last word"""

Kind = Literal["value", "told", "error", "interrupted", "traceback", "died"]
Answer: TypeAlias = tuple[Kind, Any, float]
"""what a rank said, and when: processes of one machine have the same clock"""


class RankError(RunError):
    """A rank raised, or its process died."""


def launched_elsewhere() -> bool:
    """Is this process one of several that torchrun or srun started?"""
    return TorchElasticEnvironment.detect() or _started_by_srun()


def _started_by_srun() -> bool:
    """A batch script of a job with several tasks is none of them, and neither is what is typed into a shell."""
    typed = "SLURM_PTY_PORT" in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1" and not typed


def require_started(plan: Plan) -> None:
    """Raises:
    ConfigError: torchrun or srun started another number of processes than there are to be ranks, which would learn
        each for itself or wait for one another; or the ranks are not theirs to start again.
    """
    if not launched_elsewhere():
        return
    who, name = ("torchrun", "WORLD_SIZE") if TorchElasticEnvironment.detect() else ("srun", "SLURM_NTASKS")
    if (started := int(os.environ[name])) != plan.world_size:
        raise ConfigError(
            "hardware",
            f"{who} started {started} processes, and this is for {plan.world_size}, hardware.devices={plan.devices} on"
            f" each of hardware.num_nodes={plan.num_nodes}",
        )
    if plan.max_restarts:
        raise ConfigError(
            "hardware.max_restarts", f"is for processes that rlplug starts itself, and {who} started these; 0 is right"
        )


def fabric_of(plan: Plan) -> Fabric:
    """Fabric of this rank, which has met the others.

    Raises:
        ConfigError: it was started as one of another number of ranks.
    """
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they would say that ranks are there
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")  # Fabric calls it
    strategy: Any = DDPStrategy(timeout=PATIENCE) if plan.world_size > 1 else "auto"  # wraps nothing: see learner
    if _started_by_srun():
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(plan.devices))  # Fabric asks for it, srun -n leaves it out
    try:
        fabric = Fabric(
            accelerator=plan.accelerator,
            strategy=strategy,
            devices=plan.devices,
            num_nodes=plan.num_nodes,
            plugins=[precision_of(plan)] if launched_elsewhere() else [precision_of(plan), LightningEnvironment()],
        )
        fabric.launch()
    except ValueError as error:
        raise ConfigError("hardware.devices", f"does not fit how the processes were started: {error}") from None
    return fabric


def precision_of(plan: Plan) -> Precision:
    """What Fabric computes in. Losses are scaled by the learner, whose gradients are clipped and summed over ranks."""
    if plan.precision == "32-true":
        return Precision()
    unused = torch.amp.GradScaler(plan.accelerator, enabled=False) if plan.precision == "16-mixed" else None
    return MixedPrecision(plan.precision, plan.accelerator, unused)  # type: ignore[arg-type]


def together(plan: Plan, function: Callable[..., Any], *args: Any, tell: Callable[[str], None] = print) -> Any:
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
            with _signals(signal.SIG_BLOCK):  # which processes inherit: a rank hears them once it can answer
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
        with handling(_interrupt), _signals(signal.SIG_UNBLOCK):
            join(rank, plan.devices, port)
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


def join(rank: int, ranks: int, port: int, address: str = "127.0.0.1", alone: bool = False) -> None:
    """Let Fabric recognise this process as one of several.

    Args:
        address, port: where the first one listens.
        alone: it is treated as the only one of its machine, else all are on this one.
    """
    local = (0, rank, 1) if alone else (rank, 0, ranks)
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    os.environ.update({name: str(value) for name, value in zip(names, (*local, rank, ranks), strict=True)})
    os.environ.update(TORCHELASTIC_RUN_ID="rlplug", MASTER_ADDR=address, MASTER_PORT=str(port))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody would hear of it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)


@contextmanager
def _signals(how: int) -> Iterator[None]:
    """Block or unblock Ctrl-C and SIGTERM for a while."""
    before = signal.pthread_sigmask(how, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handling(handler: Any, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``handler``; outside of the main thread signals are somebody else's."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, then in before.items():
            signal.signal(number, then)


def _end(processes: list[Any]) -> None:
    """Those that have answered end by themselves; the others wait for somebody who is gone."""
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill() if process.is_alive() else None
    for process in processes:
        process.join()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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


def one_rank() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=LightningEnvironment())


def _serve(rank: int, n: int, port: int, end: Connection) -> None:
    torch.set_num_threads(1)
    join(rank, n, port)
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

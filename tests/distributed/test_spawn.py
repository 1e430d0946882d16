"""Ranks in processes: started with a function, not with the command line; when one fails, all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from rlplug.api import Plan
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.types import ConfigError, RunError

PAIR = Plan("cpu", 2)


def total(fabric, tell, x):
    tell(f"rank {fabric.global_rank} of {fabric.world_size}")
    return fabric.all_reduce(torch.tensor(x + fabric.global_rank), reduce_op="sum").item()


def follows(fabric, tell, error):
    """Rank 0 loses what rank 1 had, and says so a moment later."""
    fabric.barrier()
    if fabric.global_rank == 1:
        raise error
    time.sleep(0.5)
    raise RunError("what follows")


def waits(fabric, tell):
    tell("waiting")
    time.sleep(3600.0)


def ignores_signals(fabric, tell):
    """Rank 1 ignores signals, as in a collective; the first one tells that both have begun."""
    if fabric.global_rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    fabric.barrier()
    waits(fabric, tell)


def test_the_first_rank_returns_and_tells():
    lines: list[str] = []
    assert spawn_ranks(PAIR, total, 3.0, tell=lines.append) == 7.0
    assert lines == ["rank 0 of 2"]


def test_the_error_of_a_rank_is_raised_and_not_what_follows_from_it():
    with pytest.raises(ConfigError, match=r"^algo\.gamma: is odd$"):
        spawn_ranks(PAIR, follows, ConfigError("algo.gamma", "is odd"))


@pytest.mark.slow
def test_a_bug_in_a_rank_is_shown_with_its_traceback():
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed:\n(.|\n)*in follows\n(.|\n)*ValueError: the cause\n$"):
        spawn_ranks(PAIR, follows, ValueError("the cause"))


@pytest.mark.slow
def test_ctrl_c_reaches_all_ranks():
    def interrupt(line: str) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(PAIR, waits, tell=interrupt)


def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first():
    def interrupt(line: str) -> None:
        for seconds in (0.5, 1.0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(PAIR, ignores_signals, tell=interrupt)


LAUNCHER = """
from rlplug.distributed.spawn import spawn_ranks
from tests.distributed.test_spawn import PAIR, waits
if __name__ == "__main__":
    spawn_ranks(PAIR, waits)
"""


def test_ranks_end_with_a_launcher_that_is_killed_while_they_import(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    search = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen([sys.executable, tmp_path / "launcher.py"], env={**os.environ, "PYTHONPATH": search})
    started: list[psutil.Process] = []
    while len(started) < PAIR.devices:  # the moment they exist: they need seconds to import torch
        children = psutil.Process(launcher.pid).children()
        started = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(started, 60.0)
    for process in alive:
        process.kill()
    assert alive == []

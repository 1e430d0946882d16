"""Runs that a sweeper of rlplug starts, each in a process of its own that ends with the sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from rlplug.cli import main as run

POLL_S = 0.2
"""seconds between two checks that the sweep's process still exists"""


class Job(Protocol):
    @property
    def folder(self) -> Path: ...

    def command(self) -> list[str] | None:
        """Return the words of a command line that trains it; None: it has been trained."""
        ...


def log(folder: Path) -> Path:
    """Return the file for the output of a run."""
    return folder.with_name(f"{folder.name}.log")


def hint(folder: Path, workers: int | None) -> str:
    """Return the part of a message that names this file, if there is one."""
    return "" if workers == 0 else f"; see {log(folder)}"


def train(jobs: Sequence[Job], workers: int | None) -> list[Path]:
    """Train runs, and return the folders of those that failed.

    Args:
        workers: runs at a time; None: one per CPU core; 0: one after another in this process.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM ended a run.
    """
    commands = [(job.folder, command) for job in jobs if (command := job.command()) is not None]
    if workers == 0:
        codes: Sequence[int] = [*map(run, (command for _, command in commands))]
    else:
        start = [sys.executable, "-m", __name__, str(os.getpid())]
        lines = [[*start, *command] for _, command in commands]
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            codes = [*pool.map(logged, lines, [str(log(folder).absolute()) for folder, _ in commands])]
    for number in (signal.SIGINT, signal.SIGTERM):
        if {128 + number, -number} & {*codes}:
            raise KeyboardInterrupt(number)
    return [folder for (folder, _), code in zip(commands, codes, strict=True) if code]


def logged(line: Sequence[str], file: str) -> int:
    """Run a command line with its output appended to a file, and return its exit code."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as output:
        return subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def _end_with(parent: int) -> None:
    """End this process when its parent ends, so that a continued sweep does not meet it."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    sys.exit(run())

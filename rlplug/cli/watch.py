"""``watch``: follow a run that another process trains, by what it writes to its folder."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml

from rlplug.cli import FAILED, say, say_run, without_json
from rlplug.cli.arguments import run_first
from rlplug.terminal import Live, Plain, Status, clock
from rlplug.types import CheckpointError, ConfigError, RunError

USAGE = """rlplug watch <run folder> [every=10] [--json]

Shows the progress of a run that another process trains, as that process does, until the run ends or Ctrl-C. It reads
the run's folder only, so the run may be on another machine that shares it, and nothing disturbs the run. The exit code
is 0 if the run finished, else 1.

  every=10                 seconds between two lines where the output is no terminal
  --json                   print the run's folder and summary as one JSON object at its end; progress is on stderr"""

PHASES = ("collect", "update", "evaluate", "estimate", "checkpoint")
LOCK = re.compile(r"process (\d+) on (.+), since")
POLL_S = 0.5
RETURNS = 64  # last returns to read


def main(arguments: Sequence[str]) -> int:
    """Follow one run.

    Raises:
        ConfigError: the folder holds no run.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, as_json = without_json(arguments)
    path, more = run_first("watch", words, "a run folder")
    every = 10.0
    for word in more:
        key, _, value = word.partition("=")
        if key != "every" or not re.fullmatch(r"\d+(\.\d+)?", value) or not float(value):
            raise ConfigError("", f"watch takes a run folder and every=<seconds>, not {word}; see rlplug watch --help")
        every = float(value)
    folder = Folder(path)
    if not (folder.path / "manifest.json").exists():
        raise CheckpointError(f"{path} holds no run")
    if (summary := folder.summary()) is None and not folder.is_running():
        raise CheckpointError(f"{path} is not being trained; rlplug resume {path} continues it")
    try:
        summary = summary or _followed(folder, sys.stderr if as_json else sys.stdout, every)
        return _ended(folder, summary, as_json)
    except KeyboardInterrupt:
        return 0


def _followed(folder: Folder, file: TextIO, every: float) -> Mapping[str, Any]:
    """Show a run until it ends, and return its summary; empty if its process ended without one."""
    show = file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    view = Live(file, folder.status, 1 / POLL_S) if show else Plain(file, folder.status, every)
    try:
        while True:
            running = folder.is_running()  # before the summary, which its process writes
            if (summary := folder.summary()) is not None or not running:
                return summary or {}
            time.sleep(POLL_S)
    finally:
        view.close()


def _ended(folder: Folder, summary: Mapping[str, Any], as_json: bool) -> int:
    """Print how a run ended, and return the exit code."""
    if not summary:
        said = f"the process of {folder.path} is gone, without a summary"
        raise RunError(f"{said}; rlplug resume {folder.path} continues it")
    if as_json:
        say_run(folder.path)
        return 0 if summary["status"] == "finished" else FAILED
    rows = {"status": summary["status"], "evaluation": _evaluation(summary) or "none"}
    rows |= {"wall time": clock(summary["wall_s"]), "run folder": str(folder.path)}
    say("\n".join(f"{key:<12}{value}" for key, value in rows.items()))
    return 0 if summary["status"] == "finished" else FAILED


class Folder:
    """A run folder, read while another process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def summary(self) -> dict[str, Any] | None:
        """Return ``summary.json``; None while the run is going on."""
        with suppress(OSError, ValueError):
            found = json.loads((self.path / "summary.json").read_bytes())
            return found if isinstance(found, dict) and {"status", "wall_s"} <= found.keys() else None
        return None

    def process(self) -> psutil.Process | None:
        """Return the process that writes the run, if it is on this machine and alive."""
        with suppress(OSError, psutil.Error):
            if (found := LOCK.match((self.path / "run.lock").read_text())) and found[2] == platform.node():
                process = psutil.Process(int(found[1]))
                return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None

    def is_running(self) -> bool:
        """Return whether its process is alive; of a process on another machine, whether it has one."""
        with suppress(OSError):
            found = LOCK.match((self.path / "run.lock").read_text())
            return found is not None and (found[2] != platform.node() or self.process() is not None)
        return False

    def rows(self) -> list[dict[str, float]]:
        """Return the whole rows of ``metrics.csv``."""
        text = ""
        with suppress(OSError):
            text = (self.path / "metrics.csv").read_bytes().decode(errors="replace")
        rows: list[dict[str, float]] = []
        with suppress(csv.Error, ValueError, TypeError):
            for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])):
                rows.append({name: float(value) for name, value in row.items() if value})
        return rows

    def status(self) -> Status:
        with suppress(OSError, yaml.YAMLError):
            self._raw = yaml.safe_load((self.path / "config.yaml").read_bytes())  # resume may have changed it
        rows, process = self.rows(), self.process()
        timed = [row for row in rows if "time/wall_s" in row]
        metrics = {name: value for row in rows for name, value in row.items()}
        memory = 0.0
        with suppress(psutil.Error):
            memory = float(process.memory_info().rss) if process else 0.0
        return Status(
            steps=int(metrics.get("step", 0)),
            total=self._raw["total_steps"],
            unit="steps" if not timed or "time/env_steps_per_s" in metrics else "updates",
            speed=_speed(timed),
            returns=[row["episode/return"] for row in rows if "episode/return" in row][-RETURNS:],
            evaluation=_evaluation(metrics),
            spent={name: metrics[f"time/{name}"] for name in PHASES if f"time/{name}" in metrics},
            memory=memory,
            checkpoint=self._checkpoint(),
        )

    def _checkpoint(self) -> str:
        every, names = self._raw["checkpoint"]["every"], [path.name for path in self.path.glob("checkpoints/step_*")]
        last = max((int(name[5:]) for name in names if name[5:].isdigit()), default=None)
        following = (
            f"then every {every}" if isinstance(every, str) else f"every {every:,} steps" if every else "at the end"
        )
        return f"checkpoint {following}" if last is None else f"checkpoint {last:,}, {following}"


def _speed(rows: Sequence[Mapping[str, float]]) -> float:
    """Return the steps per second between the last two rows of means, without evaluations."""
    if len(rows) < 2:
        return 0.0
    before, last = rows[-2:]
    gone = last["time/wall_s"] - before["time/wall_s"]
    gone -= last.get("time/evaluate", 0.0) - before.get("time/evaluate", 0.0)
    return max(last["step"] - before["step"], 0.0) / max(gone, 1e-9)


def _evaluation(metrics: Mapping[str, Any]) -> str:
    mean, std = (metrics.get(f"eval/return_{name}") for name in ("mean", "std"))
    return "" if mean is None or std is None else f"{mean:,.1f} ± {std:,.1f}"

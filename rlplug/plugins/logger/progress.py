"""Progress of the run on stderr."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlplug import hookimpl
from rlplug.api import Algorithm, Context, Run
from rlplug.settings import PositiveFloat, option, settings
from rlplug.types import STEP

NEXT = {"finished": "evaluate", "interrupted": "resume"}
WINDOW_S = 30.0  # averaging window of steps per second, in seconds


class ProgressLine:
    """Shows a bar on a terminal; elsewhere prints a line every ``every`` seconds and after each evaluation.

    A thread reads the run's counters and prints; the training loop does no work for it.
    """

    @settings
    class Config:
        live: bool = option("Redraw in place on a terminal; false, or without a terminal: plain lines.")
        refresh: PositiveFloat = option("Redraws of the live view per second.")
        every: PositiveFloat = option("Seconds between two plain lines.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg
        self._view: _Live | _Plain | None = None

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        state = State(run)
        live = self.cfg.live and sys.stderr.isatty() and not console.is_dumb_terminal
        console.print(f"run folder  {run.run_dir}", soft_wrap=True)
        self._view = _Live(console, state, self.cfg.refresh) if live else _Plain(console, state, self.cfg.every)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._view:
            self._view.state.metrics |= metrics

    @hookimpl
    def rlplug_evaluated(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self._view:
            self._view.state.metrics |= metrics
            self._view.evaluated()

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._view:
            self._view.close()
            self._view.console.print(report(run, summary), soft_wrap=True)


class State:
    """Progress values, and their texts."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics: dict[str, float] = {}
        self.unit = STEP[run.loop.unit] + "s"
        self._samples = deque([(time.monotonic(), run.steps)])

    @property
    def fraction(self) -> float:
        return min(self.run.steps / self.run.config.total_steps, 1.0)

    def speed(self) -> list[str]:
        """Return steps done, steps per second over the last ``WINDOW_S``, and the remaining time."""
        now, steps, total = time.monotonic(), self.run.steps, self.run.config.total_steps
        self._samples.append((now, steps))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        rate = (steps - before) / max(now - then, 1e-9)
        left = f"{_clock(max(total - steps, 0) / rate)} left" if rate else "-:--:-- left"
        return [f"{steps:,}/{total:,} {self.unit}", f"{rate:,.0f} {self.unit}/s", left]

    def training(self) -> list[str]:
        """Return the mean return of the last training episodes."""
        return [f"return {self.metrics['episode/return']:,.1f}"] if "episode/return" in self.metrics else []

    def scores(self) -> list[str]:
        """Return the mean return of the last training episodes, and of the last evaluation."""
        evaluation = _evaluation(self.metrics)
        return self.training() + ([f"eval {evaluation}"] if evaluation else [])


class _Live:
    """A bar and a line below it, redrawn in place."""

    def __init__(self, console: Console, state: State, refresh: float) -> None:
        self.console, self.state = console, state
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=refresh)
        self._live.start()

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1)
        percent = f"{self.state.fraction:4.0%}"
        words = [percent, *self.state.speed()]
        for _ in words:
            table.add_column(no_wrap=True)
        table.add_row(ProgressBar(total=1.0, completed=self.state.fraction), *words)
        return Group(table, Text(" · ".join(self.state.scores()) or "no episode has ended yet", no_wrap=True))

    def evaluated(self) -> None:
        """Do nothing: the next redraw shows it."""

    def close(self) -> None:
        self._live.stop()


class _Plain:
    """Plain lines, for files, pipes and CI logs."""

    def __init__(self, console: Console, state: State, every: float) -> None:
        self.console, self.state = console, state
        self._every, self._over, self._lock = every, Event(), Lock()
        self._thread = Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        while not self._over.wait(self._every):
            self._print(self.state.training())

    def evaluated(self) -> None:
        self._print(self.state.scores())

    def _print(self, scores: Sequence[str]) -> None:
        with self._lock:
            words = [f"{self.state.fraction:4.0%}", *self.state.speed(), *scores]
            self.console.print(" · ".join(words), soft_wrap=True)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def report(run: Run, summary: Mapping[str, Any]) -> str:
    """Return the summary table of a run."""
    wall, unit = summary["wall_s"], run.loop.unit
    rows = {
        "status": summary["status"],
        "evaluation": _evaluation(summary) or "none",
        f"{STEP[unit]}s": f"{summary[unit]:,} of {run.config.total_steps:,}",
        "wall time": f"{_clock(wall)}",
        "run folder": str(run.run_dir),
    }
    verb = NEXT.get(summary["status"])
    if verb and (summary.get("checkpoint") or verb == "resume"):
        words = [verb, str(run.run_dir)]
        if verb == "evaluate" and not run.config.env.cls.traits.playable:
            files = run.config.estimate.path or run.config.data.path
            words = ["estimate", words[1], f"data.path={files[0] if len(files) == 1 else '[' + ','.join(files) + ']'}"]
        if words[0] != "estimate" or run.config.algo.cls.logp is not Algorithm.logp:  # estimates need logp
            rows["next"] = f"python -m rlplug {shlex.join(words)}"
    return "\n".join(f"{key:<12}{value}" for key, value in rows.items())


def _evaluation(metrics: Mapping[str, Any]) -> str:
    """Format as ``-151.3 ± 80.2``; empty without an evaluation."""
    mean = metrics.get("eval/return_mean", math.nan)
    return "" if math.isnan(mean) else f"{mean:,.1f} ± {metrics['eval/return_std']:,.1f}"


LONGEST = 10**9  # longest remaining time shown, in seconds


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(min(seconds, LONGEST))))

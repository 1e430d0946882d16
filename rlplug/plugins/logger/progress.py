"""Progress of the run on stderr."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from os import environ
from typing import Any

import psutil

from rlplug import hookimpl
from rlplug.agents.insight import has_density
from rlplug.api import Context, Run
from rlplug.settings import PositiveFloat, option, settings
from rlplug.terminal import Live, Notebook, Plain, Status, clock, in_notebook, wrapped
from rlplug.types import STEP

NEXT = {"finished": "evaluate", "interrupted": "resume"}
WINDOW_S = 30.0  # averaging window of steps per second, in seconds
WIDTH = 116  # columns of a row of metrics
RETURNS = 64  # rows of metrics whose returns are kept


class ProgressLine:
    """Shows a view on a terminal, and one line in a notebook; elsewhere prints a line every ``every`` seconds.

    A thread reads the run's counters and prints; the training loop does no work for it.
    """

    @settings
    class Config:
        live: bool = option("Redraw in place on a terminal; false, or without a terminal: plain lines.")
        refresh: PositiveFloat = option("Redraws of the live view per second.")
        every: PositiveFloat = option("Seconds between two plain lines.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.level = cfg, "info"
        self._view: Live | Plain | Notebook | None = None
        self._state: State | None = None

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self.level = run.config.log.level
        if self.level == "warning":
            return
        _say(f"run folder  {run.run_dir}")
        self._state = State(run)
        if self.cfg.live and in_notebook():
            self._view = Notebook(self._state.status, self.cfg.refresh)
        elif self.cfg.live and sys.stderr.isatty() and environ.get("TERM") not in ("dumb", "unknown"):
            self._view = Live(sys.stderr, self._state.status, self.cfg.refresh)
        else:
            self._view = Plain(sys.stderr, self._state.status, self.cfg.every)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._state:
            self._state.logged(metrics)
        if self.level == "debug":
            _say(row(f"{step:,} {STEP[run.loop.unit]}s", metrics))

    @hookimpl
    def rlplug_evaluated(self, metrics: Mapping[str, float]) -> None:
        if self._state:
            self._state.metrics |= metrics
        if isinstance(self._view, Plain):
            self._view.evaluated()

    @hookimpl
    def rlplug_checkpoint(self, path: str) -> None:
        if self._state:
            self._state.saved(path)
        if self.level == "debug":
            _say(f"saved {path}")

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._view:
            self._view.close()
            _say(report(run, summary))


class State:
    """What is known of the run in this process."""

    def __init__(self, run: Run) -> None:
        self.run, self.process = run, psutil.Process()
        self.metrics: dict[str, float] = {}
        self._returns = deque[float](maxlen=RETURNS)
        self._samples = deque([(self._active(), run.steps)])
        self._speed, self._saved, self._saved_at = 0.0, "", (run.steps, time.monotonic())

    def logged(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics
        if "episode/return" in metrics:
            self._returns.append(metrics["episode/return"])

    def saved(self, path: str) -> None:
        name = path.rpartition("_")[2]
        self._saved = f"{int(name):,}" if name.isdigit() else ""
        self._saved_at = self.run.steps, time.monotonic()

    def status(self) -> Status:
        run = self.run
        return Status(
            steps=run.steps,
            total=run.config.total_steps,
            unit=STEP[run.loop.unit] + "s",
            speed=self._rate(),
            returns=[*self._returns],
            evaluation=evaluation(self.metrics),
            evaluating=self._evaluating(),
            spent=dict(run.clock.spent),
            memory=self.process.memory_info().rss,
            checkpoint=self._checkpoint(),
            actors=self._actors(),
        )

    def _evaluating(self) -> tuple[int, int] | None:
        ended, planned = self.run.evaluated
        return (ended, planned) if ended < planned else None

    def _active(self) -> float:
        """Return a clock in seconds that stands still during evaluations."""
        return time.monotonic() - self.run.clock.spent.get("evaluate", 0.0)

    def _rate(self) -> float:
        """Return steps per second over the last ``WINDOW_S``, without evaluations."""
        if self._evaluating() is None:
            now, steps = self._active(), self.run.steps
            while len(self._samples) > 1 and self._samples[-1][0] > now:  # from within an evaluation
                self._samples.pop()
            self._samples.append((now, steps))
            while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
                self._samples.popleft()
            then, before = self._samples[0]
            self._speed = (steps - before) / max(now - then, 1e-9)
        return self._speed

    def _checkpoint(self) -> str:
        """Return the last and the next checkpoint."""
        every, (steps, at) = self.run.config.checkpoint.every, self._saved_at
        if isinstance(every, str):
            left = 60 * float(every.removesuffix("min")) - (time.monotonic() - at)
            following = f"next in {clock(max(left, 0))}"
        else:
            following = f"next at {min((steps // every + 1) * every, self.run.config.total_steps):,}" if every else ""
        words = [self._saved, "" if self.run.steps >= self.run.config.total_steps else following or "at the end"]
        return f"checkpoint {', '.join(filter(None, words)) or 'at the end'}"

    def _actors(self) -> str:
        pool = getattr(self.run.collector, "pool", None)  # of Ray
        states = Counter(handle.status.name.lower() for handle in pool.handles) if pool else {}
        return f"{sum(states.values())} actors: {', '.join(f'{n} {s}' for s, n in states.items())}" if states else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(run: Run, summary: Mapping[str, Any]) -> str:
    """Return the summary table of a run."""
    wall, unit = summary["wall_s"], run.loop.unit
    rows = {
        "status": summary["status"],
        "evaluation": evaluation(summary) or "none",
        f"{STEP[unit]}s": f"{summary[unit]:,} of {run.config.total_steps:,}",
        "wall time": f"{clock(wall)}",
        "run folder": str(run.run_dir),
    }
    verb = NEXT.get(summary["status"])
    if verb and (summary.get("checkpoint") or verb == "resume"):
        words = [verb, str(run.run_dir)]
        if verb == "evaluate" and not run.config.env.cls.traits.playable:
            files = run.config.estimate.path or run.config.data.path
            words = ["estimate", words[1], f"data.path={files[0] if len(files) == 1 else '[' + ','.join(files) + ']'}"]
        if words[0] != "estimate" or has_density(run.config.algo.cls):
            rows["next"] = f"python -m rlplug {shlex.join(words)}"
    return "\n".join(f"{key:<12}{value}" for key, value in rows.items())


def row(steps: str, metrics: Mapping[str, float]) -> str:
    """Return the steps and a row of metrics, on lines of at most ``WIDTH`` columns."""
    return "\n    ".join([steps, *wrapped([f"{name} {value:.5g}" for name, value in metrics.items()], WIDTH)])


def evaluation(metrics: Mapping[str, Any]) -> str:
    """Format as ``-151.3 ± 80.2``; empty without an evaluation."""
    mean = metrics.get("eval/return_mean", math.nan)
    spread = f" ± {metrics['eval/return_std']:,.1f}" if "eval/return_std" in metrics else ""
    return "" if math.isnan(mean) else f"{mean:,.1f}{spread}"

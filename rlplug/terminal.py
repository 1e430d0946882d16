"""Progress of a run on a terminal: what is shown, and views that redraw or print it."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, RLock, Thread
from typing import Any, TextIO

BARS = "▁▂▃▄▅▆▇█"
SPARKS = 12  # values of a sparkline
LEAST_BAR = 8  # columns of a progress bar; a narrower one is left out
LONGEST = 10**9  # longest time shown, in seconds
GAP = "  "
GONE = (errno.EPIPE, errno.EIO)  # errors of pipes and terminals
UP, RIGHT, ERASE_BELOW, HIDE, SHOW = "\x1b[{}A\r", "\x1b[{}C", "\x1b[J", "\x1b[?25l", "\x1b[?25h"


def _cells(text: str) -> int:
    """Return the columns that a text takes."""
    from rich.cells import cell_len  # here, because it takes time to import, and few processes show progress

    return cell_len(text)


@dataclass
class Status:
    """What a view shows of a run."""

    steps: int
    total: int
    unit: str
    """of the steps: steps, updates"""
    speed: float = 0.0
    """steps per second, without evaluations"""
    returns: Sequence[float] = ()
    """mean returns of training episodes, one per row of metrics"""
    evaluation: str = ""
    evaluating: tuple[int, int] | None = None
    """finished and planned episodes of the evaluation in progress"""
    spent: Mapping[str, float] = field(default_factory=dict)
    """seconds by phase"""
    memory: float = 0.0
    """of the process, in bytes"""
    checkpoint: str = ""
    actors: str = ""

    @property
    def fraction(self) -> float:
        return min(self.steps / self.total, 1.0) if self.total else 1.0

    def progress(self) -> list[str]:
        """Return percent, steps, speed and the remaining time."""
        left = clock(max(self.total - self.steps, 0) / self.speed) if self.speed else "-:--:--"
        steps = f"{self.steps:,}/{self.total:,} {self.unit}"
        return [f"{self.fraction:4.0%}", steps, f"{self.speed:,.0f} {self.unit}/s", f"{left} left"]

    def training(self) -> list[str]:
        return [f"return {self.returns[-1]:,.1f}"] if self.returns else []

    def evaluations(self) -> list[str]:
        """Return the progress of the evaluation in progress, else the result of the last one."""
        if self.evaluating:
            return ["evaluating {}/{} episodes".format(*self.evaluating)]
        return [f"eval {self.evaluation}"] if self.evaluation else []

    def lines(self, width: int) -> list[str]:
        """Return the whole view, in lines of at most ``width`` columns."""
        words = self.progress()
        if (room := width - _cells(GAP.join(words)) - len(GAP)) >= LEAST_BAR:
            words = [bar(self.fraction, room), *words]
        curve = f" {sparkline(self.returns)}" if len(self.returns) > 1 else ""
        scores = [f"{word}{curve}" for word in self.training()] or ["no episode has ended yet"]
        scores += self.evaluations()
        if self.evaluating and (room := width - _cells(GAP.join(scores)) - len(GAP)) >= LEAST_BAR:
            scores.append(bar(self.evaluating[0] / max(self.evaluating[1], 1), min(room, 20)))
        whole = sum(self.spent.values())
        phases = [
            f"{name} {spent / whole:.0%}" for name, spent in self.spent.items() if whole and spent / whole >= 0.005
        ]
        phases += [f"memory {size(self.memory)}"] if self.memory else []
        return [
            line for part in (words, scores, phases, [self.checkpoint, self.actors]) for line in wrapped(part, width)
        ]


def wrapped(words: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of at most ``width`` columns; only a word that is longer is cut into several lines."""
    line = ""
    for word in filter(None, words):
        if line and _cells(line) + len(GAP) + _cells(word) > width:
            yield line
            line = ""
        line = f"{line}{GAP}{word}" if line else word
        while _cells(line) > width:
            yield line[:width]
            line = line[width:]
    if line:
        yield line


def bar(fraction: float, width: int) -> str:
    done = round(fraction * width)
    return "━" * done + "─" * (width - done)


def sparkline(values: Sequence[float]) -> str:
    """Draw the last values, each as a block whose height is its place between the smallest and the largest."""
    shown = [value for value in values if math.isfinite(value)][-SPARKS:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in shown)


def clock(seconds: float) -> str:
    return str(timedelta(seconds=round(min(seconds, LONGEST))))


def size(n: float) -> str:
    """Format bytes in a suitable unit."""
    power = min(max(int(n).bit_length() - 1, 0) // 10, 4)
    return f"{n / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


class Live:
    """A view that is redrawn in place at the bottom of a terminal.

    The cursor waits on an empty line above the view, so what another program prints there stays whole, and the next
    redraw puts the view below it. Lines that this process prints go above the view at once.
    """

    def __init__(self, file: TextIO, status: Callable[[], Status], refresh: float) -> None:
        self._file, self._status = file, status
        self._lock, self._over, self._partial = RLock(), Event(), ""
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._above = {name: _Above(self, own) for name, own in self._streams.items() if own.isatty()}
        for name, stream in self._above.items():
            setattr(sys, name, stream)
        self._write(HIDE)
        self.draw()
        self._thread = Thread(target=self._tick, args=(1 / refresh,), name="progress", daemon=True)
        self._thread.start()

    def draw(self) -> None:
        """Draw the view below the cursor, and return to the cursor."""
        with self._lock:
            lines = self._status().lines(_width(self._file))
            back = UP.format(len(lines)) + (RIGHT.format(_cells(self._partial)) if self._partial else "")
            self._write(f"{ERASE_BELOW}\n" + "\n".join(lines) + back)

    def print(self, text: str, stream: TextIO) -> None:
        """Print text of this process above the view."""
        with self._lock:
            self._write(ERASE_BELOW)
            stream.write(text)
            stream.flush()
            self._partial = (self._partial + text).rpartition("\n")[2]
            self.draw()

    def _tick(self, every: float) -> None:
        while not self._over.wait(every):
            self.draw()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        """Leave the last view on the terminal, and the cursor below it."""
        self._over.set()
        self._thread.join()
        for name, stream in self._above.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, self._streams[name])
        with self._lock:
            head = "\n" if self._partial else ""
            self._write(ERASE_BELOW + head + "\n".join(self._status().lines(_width(self._file))) + f"\n{SHOW}")


class _Above(io.TextIOBase):
    """A stream of this process whose lines stand above a view."""

    def __init__(self, view: Live, stream: TextIO) -> None:
        self._view, self._stream = view, stream

    def write(self, text: str) -> int:
        self._view.print(text, self._stream)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> Any:
        return self._stream.encoding


class Plain:
    """Plain lines, for files, pipes and CI logs: one every ``every`` seconds, and one after each evaluation."""

    def __init__(self, file: TextIO, status: Callable[[], Status], every: float) -> None:
        self._file, self._status = file, status
        self._every, self._over, self._lock = every, Event(), RLock()
        self._thread = Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        while not self._over.wait(self._every):
            status = self._status()
            self._print([*status.progress(), *status.training(), *(status.evaluations() if status.evaluating else ())])

    def evaluated(self) -> None:
        """Print a line with the result of an evaluation."""
        status = self._status()
        self._print([*status.progress(), *status.training(), *status.evaluations()])

    def _print(self, words: Sequence[str]) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            print(" · ".join(words), file=self._file, flush=True)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class Notebook:
    """One line of a notebook, which is updated."""

    def __init__(self, status: Callable[[], Status], refresh: float) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._status, self._over = status, Event()
        self._shown: Any = display(self._content(), raw=True, display_id=True)
        self._thread = Thread(target=self._tick, args=(1 / refresh,), name="progress", daemon=True)
        self._thread.start()

    def _content(self) -> dict[str, str]:
        status = self._status()
        words = [bar(status.fraction, 20), *status.progress(), *status.training(), *status.evaluations()]
        return {"text/plain": GAP.join(words)}

    def _tick(self, every: float) -> None:
        while not self._over.wait(every):
            self._shown.update(self._content(), raw=True)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._shown.update(self._content(), raw=True)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = module and module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _width(file: TextIO) -> int:
    """Return the columns of a terminal: ``COLUMNS``, or its own."""
    with contextlib.suppress(ValueError, OSError):
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(file.fileno()).columns or 80
    return 80


class _Unread(io.FileIO):
    """A file descriptor that discards output once its reader is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # also for output from outside of Python
            return len(data)


def outlive_readers(*names: str) -> None:
    """Keep this process running when readers of ``names``, ``sys.stdout`` or ``sys.stderr``, are gone.

    Streams replaced by a caller are unchanged.
    """
    for name in names:
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Unread(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
            )
            setattr(sys, name, text)

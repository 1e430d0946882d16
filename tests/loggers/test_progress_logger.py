"""The lines for a file and the view on a real (pseudo-)terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from collections import deque
from types import SimpleNamespace

import pyte
import pytest

from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.marwil import BC
from rlplug.plugins.env.recorded import Recorded
from rlplug.plugins.logger.progress import State
from rlplug.terminal import sparkline


def play(run, logger, **options) -> None:
    run.start(logger("progress", **options))
    run.log(250, {"episode/return": -1234.56})
    run.evaluate(-300.25, 40.0)
    run.log(1000, {"episode/return": -160.0})
    run.evaluate(-151.31, 80.2)
    run.end(**{"eval/return_mean": -151.31, "eval/return_std": 80.2})


class Terminal:
    """A pseudo-terminal in place of stdout and stderr, and the screen that it shows."""

    def __init__(self, columns: int = 80, lines: int = 40) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream, self._size = pyte.ByteStream(self.screen), (lines, columns)
        self.seen = b""

    def __enter__(self) -> Terminal:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *self._size, 0, 0))
        stream = io.TextIOWrapper(io.FileIO(self.theirs, "w", closefd=False), encoding="utf-8", write_through=True)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._redirected = contextlib.ExitStack()
        self._redirected.enter_context(contextlib.redirect_stderr(stream))
        self._redirected.enter_context(contextlib.redirect_stdout(stream))
        return self

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux raises when the other side is closed
            while chunk := os.read(self._ours, 4096):
                with self._lock:
                    self.seen += chunk
                    self._stream.feed(chunk)

    def lines(self) -> list[str]:
        """Return the lines of the screen and those that were scrolled off, without the empty ones."""
        with self._lock:
            above = ["".join(row[i].data for i in range(self.screen.columns)) for row in self.screen.history.top]
            return [line.rstrip() for line in [*above, *self.screen.display] if line.strip()]

    def wait_for(self, text: str) -> list[str]:
        for _ in range(1000):
            if any(text in line for line in self.lines()):
                return self.lines()
            time.sleep(0.01)
        raise AssertionError(f"{text!r} is not on {self.lines()}")

    def __exit__(self, *error: object) -> None:
        self._redirected.close()
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)


@pytest.fixture(autouse=True)
def known_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_file_gets_a_line_per_evaluation_and_a_table_at_the_end(run, logger, capsys):
    play(run, logger)
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    lines = err.splitlines()
    assert lines[0] == f"run folder  {run.run_dir}"
    assert re.fullmatch(
        r" 25% · 250/1,000 steps · [\d,]+ steps/s · 0:00:\d\d left · return -1,234\.6 · eval -300\.2 ± 40\.0", lines[1]
    )
    assert re.fullmatch(
        r"100% · 1,000/1,000 steps · [\d,]+ steps/s · 0:00:00 left · return -160\.0 · eval -151\.3 ± 80\.2", lines[2]
    )
    assert lines[3:] == [
        "status      finished",
        "evaluation  -151.3 ± 80.2",
        "steps       1,000 of 1,000",
        "wall time   0:01:35",
        f"run folder  {run.run_dir}",
    ]


def test_debug_also_prints_rows_and_checkpoints(run, logger, capsys):
    run.config.log.level = "debug"
    run.start(logger("progress"))
    run.log(250, {f"train/loss_of_part_{i}": -0.00123456 * i for i in range(6)})
    run.hooks.hook.rlplug_checkpoint(run=run, path="runs/x/checkpoints/step_000000000250")
    run.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "250 steps"
    assert lines[2].startswith(
        "    train/loss_of_part_0 -0  train/loss_of_part_1 -0.0012346  train/loss_of_part_2 -0.0024691"
    )
    assert " ".join(lines[2:]).count("train/loss_of_part") == 6
    assert all(len(line) <= 120 for line in lines)
    assert "saved runs/x/checkpoints/step_000000000250" in lines
    assert "status      finished" in lines


def test_warning_prints_nothing(run, logger, capsys):
    run.config.log.level = "warning"
    play(run, logger)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("status", "checkpoint", "verb"),
    [
        ("finished", "step_000000001000", "evaluate"),
        ("finished", None, None),
        ("interrupted", "step_000000001000", "resume"),
        ("interrupted", None, "resume"),
        ("failed", "step_000000001000", None),
    ],
    ids=str,
)
def test_the_table_says_what_can_be_done_next(run, logger, capsys, status, checkpoint, verb):
    run.start(logger("progress"))
    run.end(status, checkpoint=checkpoint)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next")]
    assert said == ([f"next        python -m rlplug {verb} {run.run_dir}"] if verb else [])


@pytest.mark.parametrize(
    ("algo", "files", "judged_by", "words"),
    [
        (BC, ["data"], None, "data.path=data"),
        (BC, ["a", "b c"], None, "'data.path=[a,b c]'"),
        (BC, ["data"], ["held"], "data.path=held"),
        (DDPG, ["data"], None, None),
    ],
)
def test_without_an_environment_estimates_come_next(run, logger, capsys, algo, files, judged_by, words):
    run.config.algo, run.config.env = SimpleNamespace(cls=algo), SimpleNamespace(cls=Recorded)
    run.config.data, run.config.estimate = SimpleNamespace(path=files), SimpleNamespace(path=judged_by)
    run.start(logger("progress"))
    run.end("finished", checkpoint="step_000000001000")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next")]
    assert said == ([f"next        python -m rlplug estimate {run.run_dir} {words}"] if words else [])


def test_a_file_hears_of_a_run_that_neither_evaluates_nor_ends(run, logger, capsys):
    run.start(logger("progress", every=0.01))
    seen = ""
    for _ in range(1000):
        seen += capsys.readouterr().err
        if seen.count("0/1,000 steps") >= 2:
            break
        time.sleep(0.01)
    run.end("interrupted")
    assert seen.count("  0% · 0/1,000 steps · 0 steps/s · -:--:-- left") >= 2
    assert "evaluation  none" in capsys.readouterr().err


def test_an_evaluation_is_told_once(run, logger, capsys):
    run.start(logger("progress", every=0.01))
    run.evaluate(3.0, 0.5)
    seen = ""
    for _ in range(1000):
        seen += capsys.readouterr().err
        if seen.partition("eval 3.0 ± 0.5")[2].count("steps/s") >= 2:
            break
        time.sleep(0.01)
    run.end("interrupted")
    assert seen.count("eval 3.0 ± 0.5") == 1


@pytest.mark.parametrize("columns", [80, 130])
def test_a_terminal_is_redrawn_in_place(columns, run, logger):
    run.clock.spent = {"collect": 60.0, "update": 35.0, "evaluate": 5.0, "checkpoint": 0.01}
    with Terminal(columns) as terminal:
        play(run, logger)
    lines = terminal.lines()
    at = lines.index("status      finished")
    view = lines[at - 4 : at]
    assert re.fullmatch(r"━+  100%  1,000/1,000 steps  [\d,]+ steps/s  0:00:00 left", view[0])
    assert len(view[0]) == columns
    assert view[1] == "return -160.0 ▁█  eval -151.3 ± 80.2"
    assert re.fullmatch(r"collect 60%  update 35%  evaluate 5%  memory [\d.]+ [MG]iB", view[2])
    assert view[3] == "checkpoint at the end"
    assert sum("1,000/1,000" in line for line in lines) == 1
    seen = terminal.seen.decode()
    assert seen.index("\x1b[?25l") < seen.index("\x1b[?25h") < seen.index("status")  # the cursor


@pytest.mark.parametrize("columns", [80, 130])
def test_nothing_is_cut_and_every_line_fits(columns, run, logger):
    run.config.total_steps, run.progress.env_steps = 1_000_000_000, 123_456_789
    run.clock.spent = dict.fromkeys(("collect", "update", "evaluate", "checkpoint", "estimate", "wait", "sample"), 10.0)
    names = ["PLAYING"] * 3 + ["RESTARTING", "LOST", "STARTING"]
    handles = [SimpleNamespace(status=SimpleNamespace(name=name)) for name in names]
    run.collector = SimpleNamespace(pool=SimpleNamespace(handles=handles))
    with Terminal(columns) as terminal:
        run.start(logger("progress", refresh=100.0))
        run.log(123_456_789, {"episode/return": -1_234_567.8})
        run.hooks.hook.rlplug_checkpoint(run=run, path="/x/step_000123000000")
        run.evaluate(-1_234_567.8, 1_234_567.8)
        lines = terminal.wait_for("checkpoint 123,000,000")
        run.end()
    text = " ".join(lines)
    for piece in (
        "12%  123,456,789/1,000,000,000 steps",
        "return -1,234,567.8",
        "eval -1,234,567.8 ± 1,234,567.8",
        *(f"{name} 14%" for name in run.clock.spent),
        "checkpoint 123,000,000, next in 0:0",
        "6 actors: 3 playing, 1 restarting, 1 lost, 1 starting",
    ):
        assert piece in text
    assert max(map(len, lines)) <= columns


def test_an_evaluation_shows_its_own_progress_and_does_not_count(run, logger):
    with Terminal() as terminal:
        run.start(logger("progress", refresh=100.0))
        run.log(500, {"episode/return": 1.0})
        terminal.wait_for(" 50%  500/1,000 steps")
        run.evaluated = (3, 20)
        during = terminal.wait_for("evaluating 3/20 episodes  ━━━─")
        time.sleep(0.3)
        later = terminal.lines()
        run.evaluated = (20, 20)
        run.end()
    (speed,), (same,) = ([re.findall(r"500/1,000.*", line)[0] for line in lines if "500/1,000" in line]
                         for lines in (during, later))  # fmt: skip
    assert speed == same  # speed and remaining time stand still


def test_the_time_of_evaluations_is_not_in_the_speed(run):
    state = State(run)
    run.progress.env_steps = 100
    state._samples = deque([(state._active() - 1.0, 0)])
    before = state.status().speed
    run.clock.spent["evaluate"] = 5.0
    state._samples = deque([(state._active() - 1.0, 0)])
    assert state.status().speed == pytest.approx(before, rel=0.2)


def test_lines_of_others_stay_whole(run, logger):
    """Lines that this process prints, and those that another program writes to the terminal."""
    with Terminal(100) as terminal:
        run.start(logger("progress", refresh=200.0))
        for i in range(40):
            print(f"printed {i}" + "\n  with more" * (i % 3))
            print(f"partly {i}", end="")
            time.sleep(0.004)
            print(" and wholly", file=sys.stderr)
            time.sleep(0.02)
            os.write(terminal.theirs, f"another program writes {i}\n".encode())
            time.sleep(0.02)
        run.end()
    lines = terminal.lines()
    for i in range(40):
        at = lines.index(f"printed {i}")
        assert lines[at + 1 : at + 1 + i % 3] == ["  with more"] * (i % 3)
        assert lines[at + 1 + i % 3 : at + 3 + i % 3] == [f"partly {i} and wholly", f"another program writes {i}"]
    assert sum("no episode has ended yet" in line for line in lines) == 1  # the view, once


def test_the_streams_are_as_before_at_the_end(run, logger):
    with Terminal():
        before = sys.stdout, sys.stderr
        run.start(logger("progress"))
        assert sys.stdout is not before[0]
        assert sys.stdout.isatty()
        run.end()
        assert (sys.stdout, sys.stderr) == before


def test_a_terminal_gets_plain_lines_on_request(run, logger):
    with Terminal() as terminal:
        play(run, logger, live=False)
    assert b"\x1b" not in terminal.seen
    assert any(line.startswith(" 25% · 250/1,000 steps") for line in terminal.lines())


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([math.nan, 1.0, math.inf, 2.0]) == "▁█"
    assert sparkline([math.nan]) == ""


def test_a_failed_start_of_another_logger_leaves_the_end_quiet(run, logger, capsys):
    run.hooks.register(logger("progress"))
    run.end("failed")
    assert capsys.readouterr().err == ""

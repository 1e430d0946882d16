"""The lines for a file and the view on a real (pseudo-)terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import threading
import time
from types import SimpleNamespace

import pytest
from rich.text import Text

from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.marwil import BC
from rlplug.plugins.env.recorded import Recorded


def play(run, logger, **options) -> None:
    run.start(logger("progress", **options))
    run.log(250, {"episode/return": -1234.56})
    run.evaluate(-300.25, 40.0)
    run.log(1000, {"episode/return": -160.0})
    run.evaluate(-151.31, 80.2)
    run.end(**{"eval/return_mean": -151.31, "eval/return_std": 80.2})


class Terminal:
    """A pseudo-terminal in place of stderr; what appears on it is read all along."""

    seen = ""

    def __enter__(self) -> Terminal:
        self._ours, theirs = pty.openpty()
        self._stderr = io.TextIOWrapper(io.FileIO(theirs, "w"), encoding="utf-8", write_through=True)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._redirected = contextlib.redirect_stderr(self._stderr)
        self._redirected.__enter__()
        return self

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux raises when the other side is closed
            while chunk := os.read(self._ours, 4096):
                self._bytes += chunk

    def __exit__(self, *error: object) -> None:
        self._redirected.__exit__(*error)
        self._stderr.close()
        self._reader.join()
        os.close(self._ours)
        self.seen = self._bytes.decode().replace("\r\n", "\n")


@pytest.fixture(autouse=True)
def known_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


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
        (DQN, ["data"], None, None),
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


def test_a_terminal_is_redrawn_in_place(run, logger):
    with Terminal() as terminal:
        play(run, logger)
    lines = [Text.from_ansi(line).plain.rstrip() for line in terminal.seen.split("\n")]
    view = lines.index("return -160.0 · eval -151.3 ± 80.2")
    assert re.fullmatch(r"━+  100%  1,000/1,000 steps  [\d,]+ steps/s  0:00:00 left", lines[view - 1])
    assert len(lines[view - 1]) == 80
    assert lines[view + 1] == "status      finished"
    assert lines[-2] == f"run folder  {run.run_dir}"
    hidden, shown = terminal.seen.index("\x1b[?25l"), terminal.seen.index("\x1b[?25h")
    assert hidden < shown < terminal.seen.index("status")  # the cursor


def test_a_terminal_gets_plain_lines_on_request(run, logger):
    with Terminal() as terminal:
        play(run, logger, live=False)
    assert "\x1b" not in terminal.seen
    assert " 25% · 250/1,000 steps" in terminal.seen


def test_a_failed_start_of_another_logger_leaves_the_end_quiet(run, logger, capsys):
    run.hooks.register(logger("progress"))
    run.end("failed")
    assert capsys.readouterr().err == ""

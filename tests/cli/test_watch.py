"""``watch`` follows a run of another process by its folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlplug.cli import main
from rlplug.cli.watch import Folder
from tests.loggers.test_progress_logger import Terminal

RUN = ["algo=ppo", "env=cartpole", "tuned=none", "num_envs=2", "rollout_fragment_length=64", "model.hidden=[8]"]
RUN += ["algo.sgd_minibatch_size=64", "log.every=256", "eval.every=2048", "eval.episodes=1", "logger.only=[]"]
RUN += ["hardware=cpu", "checkpoint.every=1024"]


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command, by default a run in a folder that has logged some rows; whatever happens, it ends."""
    with ExitStack() as processes:

        def start(folder: Path, steps: int = 0, *words: str, **options: Any) -> subprocess.Popen[bytes]:
            words = words or ("train", *RUN, f"total_steps={steps}", f"hydra.run.dir={folder}")
            options = {"stderr": subprocess.DEVNULL, **options}
            process = subprocess.Popen([sys.executable, "-m", "rlplug", *words], preexec_fn=interruptible, **options)
            processes.enter_context(process)
            processes.callback(process.kill)
            if words[0] == "train":
                for _ in range(2400):
                    if len(Folder(folder).rows()) > 3:
                        return process
                    time.sleep(0.05)
                    assert process.poll() is None
                raise AssertionError("no rows")
            return process

        yield start


def interruptible() -> None:
    """A shell lets its background processes ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("columns", [80, pytest.param(130, marks=pytest.mark.slow)])
def test_a_terminal_shows_the_run_until_it_ends(columns: int, tmp_path: Path, start: Start):
    folder = tmp_path / "run"
    process = start(folder, 20_000)
    with Terminal(columns) as terminal:
        own = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm"}
        watching = start(folder, 0, "watch", str(folder), stdout=terminal.theirs, stderr=terminal.theirs, env=own)
        terminal.wait_for("return ")
        assert watching.wait(120) == 0
    assert process.wait(60) == 0
    lines = terminal.lines()
    at = next(i for i, line in enumerate(lines) if line.startswith("status "))
    view = "  ".join(lines[at - 4 : at])
    summary = json.loads((folder / "summary.json").read_text())
    score = f"{summary['eval/return_mean']:,.1f} ± {summary['eval/return_std']:,.1f}"
    for piece in (
        "100%",
        r"[\d,]+/20,000 steps",
        r"return [\d.]+ [▁-█]+",
        "collect .*%  update .*%",
        "checkpoint 20,0",
    ):
        assert re.search(piece, view) or (piece.startswith("checkpoint") and "checkpoint 19," in view), piece
    assert f"eval {score}" in view
    assert lines[at : at + 2] == ["status      finished", f"evaluation  {score}"]
    assert max(map(len, lines[: at + 3])) <= columns


def test_a_pipe_gets_lines_and_a_killed_run_is_noticed(tmp_path: Path, start: Start):
    folder = tmp_path / "run"
    process = start(folder, 10_000_000)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name == "run.lock"}
    watching = start(folder, 0, "watch", str(folder), "every=0.2", **PIPES, text=True)
    assert watching.stdout is not None
    line = watching.stdout.readline()
    assert re.fullmatch(r"  0% · [\d,]+/10,000,000 steps · [\d,]+ steps/s · [\d:days, ]+ left · return [\d.]+\n", line)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    process.kill()
    process.wait()
    _, said = watching.communicate(timeout=60)
    assert watching.returncode == 1
    assert said == f"rlplug: the process of {folder} is gone, without a summary; rlplug resume {folder} continues it\n"
    assert main(["watch", str(folder)]) == 2


def test_ctrl_c_detaches_and_the_run_goes_on(tmp_path: Path, start: Start):
    folder = tmp_path / "run"
    process = start(folder, 10_000_000)
    watching = start(folder, 0, "watch", str(folder), "every=0.2", **PIPES)
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=60)
    assert (watching.returncode, said) == (0, b"")
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("words", "says"),
    {
        "watch": "watch takes a run folder; see rlplug watch --help",
        "watch --all": "watch takes a run folder; see rlplug watch --help",
        "watch run every=0": "watch takes a run folder and every=<seconds>, not every=0; see rlplug watch --help",
        "watch run x=1": "watch takes a run folder and every=<seconds>, not x=1; see rlplug watch --help",
        "watch nothing-here": "nothing-here does not exist",
    }.items(),
)
def test_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    code = main(words.split())
    assert (code, capsys.readouterr().err) == (2, f"rlplug: {says}\n")

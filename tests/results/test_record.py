"""What a run folder says: states, figures, and a ``metrics.csv`` that is not whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlplug.results.record import read, read_metrics
from rlplug.types import CheckpointError
from tests.results.conftest import Make

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

DAMAGED = {
    "half a row at the end": (b"step,a\n10,1\n20,2\n30", {"a": [[10, 20], [1, 2]]}, "1 of 3 rows", "first line 4"),
    "a row without end": (b"step,a\n10,1\n20,2\n30,3", {"a": [[10, 20], [1, 2]]}, "1 of 3 rows", "first line 4"),
    "letters": (b"step,a,b\n10,1,2\n20,x,3\n30,3,\n", {"a": [[10, 30], [1, 3]], "b": [[10], [2]]}, "1 of 3", "line 3"),
    "too few cells": (
        b"step,a,b\n10,1,2\n20,1\n30,3,4\n",
        {"a": [[10, 30], [1, 3]], "b": [[10, 30], [2, 4]]},
        "1 of 3",
    ),
    "too many cells": (b"step,a\n10,1\n20,1,5\n30,3\n", {"a": [[10, 30], [1, 3]]}, "1 of 3"),
    "an empty line": (b"step,a\n10,1\n\n30,3\n", {"a": [[10, 30], [1, 3]]}, "1 of 3"),
    "zeros of a full disk": (b"step,a\n10,1\n" + bytes(5) + b"\n30,3\n", {"a": [[10, 30], [1, 3]]}, "1 of 3"),
    "no text": (b"step,a\n10,1\n\xff\xfe,2\n30,3\n", {"a": [[10, 30], [1, 3]]}, "1 of 3"),
    "a step that goes back": (b"step,a\n10,1\n30,3\n20,2\n", {"a": [[10, 30], [1, 3]]}, "1 of 3", "line 4"),
    "no step": (b"step,a\n10,1\n,2\nnan,3\ninf,4\n", {"a": [[10], [1]]}, "3 of 4"),
    "another file": (b"time,a\n10,1\n", {}, "has no column 'step'"),
    "binary": (bytes(range(256)), {}, "has no column 'step'"),
    "a head with a line end of its own": (b"step\ra,b\n1,2\n", {}, "has no column 'step'"),
    "a head without end": (b"x" * 200_000, {}, "has no column 'step'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_whole_rows_of_a_damaged_file_are_used(name: str, tmp_path: Path):
    data, whole, *said = DAMAGED[name]
    (tmp_path / "metrics.csv").write_bytes(data)
    metrics, damage = read_metrics(tmp_path / "metrics.csv")
    assert {name: curve.tolist() for name, curve in metrics.items()} == whole
    assert damage.startswith(f"{tmp_path / 'metrics.csv'}")
    assert all(part in damage for part in said)
    assert "\n" not in damage


WHOLE = {
    "blanks": (b"step,a,b\n10,1,\n10,,2\n", {"a": [[10], [1]], "b": [[10], [2]]}),
    "values that are not finite": (b"step,a\n10,nan\n20,inf\n30,1\n", {"a": [[30], [1]]}),
    "empty": (b"", {}),
    "a head": (b"step,a\n", {}),
    "ends of lines of another system": (b"step,a\r\n10,1\r\n", {"a": [[10], [1]]}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_not_called_damaged(name: str, tmp_path: Path):
    data, whole = WHOLE[name]
    (tmp_path / "metrics.csv").write_bytes(data)
    metrics, damage = read_metrics(tmp_path / "metrics.csv")
    assert {name: curve.tolist() for name, curve in metrics.items()} == whole
    assert damage == ""


def test_a_missing_file_has_no_metrics(tmp_path: Path):
    assert read_metrics(tmp_path / "metrics.csv") == ({}, "")


def test_a_finished_run(here: Path):
    folder = Path("runs/sweep/algo=dqn,seed=2")
    run, summary = read(folder), json.loads((folder / "summary.json").read_text())
    assert (run.state, run.algo, run.env, run.unit) == ("finished", "dqn", "CartPole-v1", "env_steps")
    assert run.steps == summary["env_steps"] == 320
    assert run.last("eval/return_mean") == summary["eval/return_mean"] == run.metrics["eval/return_mean"][1, -1]
    assert run.last("train/nothing") is None
    assert run.damage == ""
    assert run.command[:5] == ["python", "-m", "rlplug", "train", "algo=dqn"]
    assert 0 <= run.age_s < 3600
    steps, values = run.metrics["eval/return_mean"]
    assert np.diff(steps).min() > 0
    assert len(values) == 4


@pytest.mark.parametrize(
    ("summary", "state"),
    [('{"status": "failed"}', "failed"), ('{"status": "interrupted"}', "interrupted"), (None, "killed")]
    + [(text, "killed") for text in ('{"status": "fini', '{"status": "odd"}', '{"status": ["odd"]}', "[]")],
)
def test_the_state_of_a_run_that_has_not_finished(summary: str | None, state: str, make: Make):
    folder = make("run", {"a": [1, 2]}, status=None)
    if summary is not None:
        (folder / "summary.json").write_text(summary)
    assert (read(folder).state, read(folder).steps) == (state, 20)


def test_a_run_is_running_while_a_process_holds_its_lock(make: Make):
    folder = make("run", {"a": [1, 2]}, status="interrupted")
    (folder / "run.lock").write_text("process 1 on here")
    assert read(folder).state == "interrupted"
    command = [sys.executable, "-c", HOLD, folder / "run.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert read(folder).state == "running"
        process.communicate()
    assert read(folder).state == "interrupted"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.yaml", "a: [1", "config.yaml: while parsing"),
        ("config.yaml", "a: &x 1\nb: *x\n", "config.yaml: it has an alias"),
        ("config.yaml", "- 1\n", "config.yaml: it is no mapping"),
        ("manifest.json", "{", "manifest.json: "),
        ("manifest.json", "[" * 100_000, "manifest.json: "),
    ],
)
def test_damaged_settings_are_refused(name: str, text: str, said: str, make: Make):
    folder = make("run", {"a": [1]})
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"^run is damaged or was altered: {said}"):
        read(folder)

"""``rlplug runs`` and ``rlplug diff``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplug.cli import main
from rlplug.results.listing import ago, number
from tests.results.conftest import Make

Capture = pytest.CaptureFixture[str]
HEAVY = ("hydra", "matplotlib", "ray", "scipy", "torch")


def test_a_list_of_runs_and_sweeps(here: Path, capsys: Capture):
    for i, name in enumerate(sorted(os.listdir("runs/sweep"))):
        then = time.time() - 7000 * (i + 1)
        for file in Path("runs/sweep", name).glob("*.*"):
            os.utime(file, (then, then))
    assert main(["runs"]) == 0
    head, *rows, empty, sweeps, sweep = capsys.readouterr().out.splitlines()
    assert head.split() == ["state", "algo", "env", "seed", "steps", "evaluation", "training", "age", "run"]
    assert [row.split()[:4] for row in rows] == [
        ["finished", algo, "CartPole-v1", seed] for algo in ("a2c", "dqn") for seed in ("1", "2")
    ]  # newest first
    summaries = [json.loads((Path(row.split()[-1]) / "summary.json").read_text()) for row in rows]
    assert [int(row.split()[4]) for row in rows] == [summary["env_steps"] for summary in summaries]
    assert [" ".join(row.split()[-3:-1]) for row in rows] == ["2 h", "4 h", "6 h", "8 h"]
    assert rows[0].endswith("runs/sweep/algo=a2c,seed=1")
    assert (empty, sweeps.split()[:2]) == ("", ["jobs", "states"])
    assert sweep.startswith("4     4 finished  ")
    assert sweep.endswith("runs/sweep")


def test_a_list_as_json(here: Path, capsys: Capture):
    assert main(["runs", "algo=dqn", "seed=2", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (run,) = listed["runs"]
    summary = json.loads(Path("runs/sweep/algo=dqn,seed=2/summary.json").read_text())
    assert run.pop("age_s") >= 0
    assert run.pop("episode/return") > 0
    assert run == {
        "run": "runs/sweep/algo=dqn,seed=2",
        "state": "finished",
        "algo": "dqn",
        "env": "CartPole-v1",
        "seed": 2,
        "steps": 320,
        "total_steps": 320,
        "unit": "env_steps",
        "eval/return_mean": summary["eval/return_mean"],
    }
    assert [sweep["states"] for sweep in listed["sweeps"]] == [{"finished": 4}]


def test_a_run_that_goes_on_shows_how_far_it_is(make: Make, capsys: Capture):
    make("runs/r0", {"episode/return": [1, 2]}, status=None, total_steps=1000)
    assert main(["runs"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[:8] == ["killed", "a2c", "CartPole-v1", "1", "20", "of", "1,000", "2.00"]


def test_no_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert capsys.readouterr().err == "rlplug: there is no folder runs here; name another one\n"


def test_a_list_imports_nothing_heavy(here: Path):
    """Neither does the help of the verbs that draw."""
    for words in (["runs"], ["plot", "--help"], ["report", "--help"]):
        program = f"import sys; from rlplug.cli import main; code = main({words}); "
        program += f"print(code, [name for name in {HEAVY} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0 []"


def test_what_differs_between_two_runs(here: Path, capsys: Capture):
    assert main(["diff", "algo=a2c,seed=1/", "runs/sweep/algo=dqn,seed=1"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["algo.name", "a2c", "dqn"] in lines
    assert ["seed", "1", "1"] not in lines
    assert "versions: equal" in out
    assert "machine: equal" in out
    steps = [json.loads(Path("runs/sweep", f"algo={algo},seed=1/summary.json").read_text()) for algo in ("a2c", "dqn")]
    assert ["env_steps", *(str(summary["env_steps"]) for summary in steps)] in lines


def test_differences_as_json(here: Path, make: Make, capsys: Capture):
    a, b = (
        make("a", {"x": [1]}, seed=1),
        make("b", {"x": [2]}, status=None, seed=2, log__more=None),
    )
    manifest = json.loads((b / "manifest.json").read_text())
    manifest["versions"]["torch"] = "9.9"
    manifest |= {"git": {"commit": "abc", "changed": True}}
    manifest["hardware"]["cpus"] = 999
    (b / "manifest.json").write_text(json.dumps(manifest))
    before = json.loads((a / "manifest.json").read_text())
    assert main(["diff", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == ("a", "b")
    assert found["settings"] == {"seed": [1, 2], "log.more": ["", None]}
    assert found["versions"] == {"torch": [before["versions"]["torch"], "9.9"]}
    assert found["machine"] == {"cpus": [before["hardware"]["cpus"], 999]}
    assert found["commit"]["commit"][1] == "abc"
    assert found["figures"]["status"] == ["finished", "killed"]
    assert found["figures"]["x"] == ["", 2.0]


def test_numbers_are_short():
    assert [number(x) for x in (None, 0.0, 0.25, -1234.56, 1e7, 1e-5)] == [
        "",
        "0.00",
        "0.25",
        "-1,234.6",
        "1e+07",
        "1e-05",
    ]
    assert [ago(x) for x in (3, 90, 7000, 200_000)] == ["3 s", "2 min", "2 h", "2 d"]

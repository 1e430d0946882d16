"""Sweeps survive: bad jobs, Ctrl-C, SIGKILL; the same command completes them."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplug.cli import main
from rlplug.cli.sweep import LONGEST, _rows, check_sweep, folder_name, grouped, report
from rlplug.config import composed
from rlplug.testing.comparing import differences_of_runs
from tests.cli.test_main import SHORT

SWEEP = ["-m", *SHORT, "hydra.sweep.dir=sweep"]


def rows(sweep: str = "sweep") -> list[dict[str, str]]:
    with (Path(sweep) / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def statuses(sweep: str = "sweep") -> dict[str, str]:
    return {row["job"]: row["status"] for row in rows(sweep)}


def resumes(job: Path) -> int:
    return len(json.loads((job / "manifest.json").read_text())["resumed"])


def test_a_bad_job_does_not_keep_the_others_from_running(capsys: pytest.CaptureFixture[str]):
    assert main([*SWEEP, "total_steps=256", "algo.lr=1e30,1e-3"]) == 1
    assert statuses() == {"algo.lr=0.001": "finished", "algo.lr=1e+30": "failed"}  # the best one first
    good, bad = rows()
    assert float(good["score"]) > 0
    assert (bad["score"], bad["algo.lr"]) == ("", "1e+30")
    assert bad["error"].startswith("PPO: the loss term 'value' is infinite")
    out, err = capsys.readouterr()
    head, first, second, last = out.splitlines()[-4:]
    assert head.split() == ["algo.lr", "score", "status"]
    assert first.split() == ["0.001", f"{float(good['score']):,.1f}", "finished"]
    assert second.split()[:2] == ["1e+30", "failed"]
    assert last == "as a table: sweep/sweep.csv"
    assert err.splitlines()[-1].endswith(
        " 1 of 2 jobs did not finish; the same command with hydra.sweep.dir=sweep retries them"
    )


def test_a_refused_job_is_one_too(capsys: pytest.CaptureFixture[str]):
    assert main([*SWEEP, "total_steps=1,64"]) == 1
    assert statuses() == {"total_steps=64": "finished", "total_steps=1": "failed"}
    assert [file.name for file in Path("sweep/total_steps=1").iterdir()] == ["job.json"]
    assert "rlplug: total_steps: 1 " in capsys.readouterr().err


def test_a_bug_is_one_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def start(config, *rest):
        if config.seed == 1:
            raise ZeroDivisionError("a bug")
        return train(config, *rest)

    from rlplug.run import launch

    train = launch.train
    monkeypatch.setattr(launch, "train", start)
    assert main([*SWEEP, "seed=1,2"]) == 1
    assert statuses() == {"seed=2": "finished", "seed=1": "failed"}
    assert rows()[1]["error"] == "ZeroDivisionError: a bug"
    assert "Traceback" in capsys.readouterr().err


def test_the_same_command_runs_only_what_has_not_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main([*SWEEP, "seed=1,2"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("sweep").rglob("summary.json")}
    scores = {row["job"]: row["score"] for row in rows()}
    assert main([*SWEEP, "seed=1,2,3"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {row["job"]: row["score"] for row in rows() if row["job"] != "seed=3"} == scores
    assert sorted(statuses()) == ["seed=1", "seed=2", "seed=3"]
    printed = capsys.readouterr()
    assert f"rlplug: seed=1: has already finished, with {float(scores['seed=1']):,.1f}" in printed.err

    assert report(Path("sweep")) == 0  # of ranks that torchrun started, the first prints the table
    assert capsys.readouterr().out.splitlines() == printed.out.splitlines()[-4:]
    head, values, _ = printed.out.splitlines()[-3:]
    assert head.split() == ["score", "95", "%", "interval", "seeds", "status"]
    seeds = [float(row["score"]) for row in rows()]
    assert values.split()[0] == f"{sum(seeds) / 3:,.1f}"
    assert values.split()[-2:] == ["3", "finished"]
    assert all(float(row["mean_low"]) <= float(row["mean"]) <= float(row["mean_high"]) for row in rows())
    assert report(Path("sweep"), as_json=True) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert (group["values"], group["seeds"], group["score"]) == ({}, 3, pytest.approx(sum(seeds) / 3))
    monkeypatch.setenv("RANK", "1")
    assert report(Path("sweep")) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")

    kept = {path: path.read_bytes() for path in Path("sweep").glob("*/*") if path.is_file()}
    assert main([*SWEEP, "seed=1,2", "algo.gamma=0.5"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("rlplug: hydra.sweep.dir: ")
    assert message.endswith("/sweep/seed=1 was made with algo.gamma=0.99, which now is 0.5; choose another folder")
    assert {path: path.read_bytes() for path in Path("sweep").glob("*/*") if path.is_file()} == kept

    Path("sweep/elsewhere").mkdir()
    os.mkfifo("sweep/elsewhere/job.json")
    assert main([*SWEEP, "seed=1,2"]) == 1
    assert statuses()["elsewhere"] == "unreadable"
    assert "Not a regular file" in capsys.readouterr().out


def test_folders_are_named_by_what_varies():
    assert main([*SWEEP, "algo.lr=1e-3", "model.hidden=[8],[4,4]", "algo.clip_param=0.1,0.2"]) == 0
    assert sorted(statuses()) == [
        f"algo.clip_param={clip},model.hidden={hidden}" for clip in (0.1, 0.2) for hidden in ("[4,4]", "[8]")
    ]
    assert main([*SWEEP, "hydra.sweep.dir=one"]) == 0
    assert statuses("one") == {"0": "finished"}


def test_names_of_folders_are_names_everywhere():
    assert folder_name("env.id=ALE/Pong-v5,seed=1", 0) == "env.id=ALE_Pong-v5,seed=1"
    assert folder_name("", 3) == "3"
    long = [folder_name(f"algo.lr={'ä' * 300}{i}", 0) for i in range(2)]
    assert all(len(name.encode()) <= LONGEST + 10 for name in long)
    assert long[0] != long[1]


def test_two_sweeps_and_two_runs_of_the_same_second_do_not_meet():
    assert len({str(check_sweep([*SHORT, "seed=1,2"])[0]) for _ in range(2)}) == 2
    assert len({str(composed(SHORT).hydra.run.dir) for _ in range(2)}) == 2


FOUR = ["-m", *SHORT, "total_steps=1024", "checkpoint.every=128", "algo.lr=1e-3,3e-4", "seed=1,2"]


def start(folder: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rlplug", *FOUR, f"hydra.sweep.dir={folder}"]
    return subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(pattern: str, program: "subprocess.Popen[str]") -> Path:
    while not (found := list(Path().glob(pattern))):
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_jobs_stopped_in_the_middle_finish_once_each(number: int):
    names = [f"algo.lr={lr},seed={seed}" for lr in ("0.001", "0.0003") for seed in (1, 2)]
    program = start("sweep")
    wait_for(f"sweep/{names[2]}/checkpoints/*/manifest.json", program)
    program.send_signal(number)
    out, _ = program.communicate()
    assert program.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGINT:
        assert statuses()[names[2]] == "interrupted"
        assert "interrupted" in out
    done = {
        path: path.stat().st_mtime_ns for path in Path("sweep").glob("*/summary.json") if path.parent.name != names[2]
    }
    assert len(done) == 2

    assert main([*FOUR, "hydra.sweep.dir=sweep"]) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert statuses() == dict.fromkeys(sorted(names, key=[row["job"] for row in rows()].index), "finished")
    assert [resumes(Path("sweep") / name) for name in names] == [0, 0, 1, 0]
    if number == signal.SIGKILL:
        assert main([*FOUR, "hydra.sweep.dir=whole"]) == 0
        assert all(differences_of_runs(Path("sweep") / name, Path("whole") / name) == [] for name in names)


def test_the_setting_with_the_best_mean_is_first_not_the_one_with_a_lucky_seed():
    scores = {"a": [10.0, 10.0, 10.0], "b": [25.0, 0.0, 1.0], "c": [math.nan]}
    for x, of in scores.items():
        for seed, score in enumerate(of):
            job = Path(f"sweep/x={x},seed={seed}")
            job.mkdir(parents=True)
            status = "failed" if math.isnan(score) else "finished"
            (job / "job.json").write_text(json.dumps({"values": {"x": x, "seed": str(seed)}, "status": status}))
            (job / "summary.json").write_text(json.dumps({"eval/return_mean": score}))
    groups = grouped(_rows(Path("sweep")))
    assert [(group["values"]["x"], group["score"]) for group in groups[:2]] == [
        ("a", 10.0),
        ("b", pytest.approx(26 / 3)),
    ]
    assert (groups[0]["low"], groups[0]["high"]) == (10.0, 10.0)
    assert groups[1]["low"] < 26 / 3 < groups[1]["high"]
    assert (groups[2]["status"], groups[2]["seeds"]) == ("failed", 0)


SWEEPER = """
from dataclasses import dataclass, field
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

@dataclass
class Conf:
    _target_: str = "hydra_plugins.drawing.Drawing"
    direction: str = "minimize"
    max_failure_rate: float = 0.0

ConfigStore.instance().store(group="hydra/sweeper", name="drawing", node=Conf)

class Drawing(Sweeper):
    \"\"\"Draws from interval(a,b): both ends and the middle; ends when too many jobs fail, as Optuna's.\"\"\"
    def __init__(self, direction, max_failure_rate):
        self.direction, self.rate = direction, max_failure_rate

    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        plugins = Plugins.instance()
        self.launcher = plugins.instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        from pathlib import Path
        from hydra.core.override_parser.overrides_parser import OverridesParser
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        parsed = OverridesParser.create().parse_overrides(arguments)
        (drawn,) = [o for o in parsed if o.is_interval_sweep()]
        fixed = [o.input_line for o in parsed if o is not drawn]
        start, end = drawn.value().start, drawn.value().end
        failed, scores = [], []
        for i, x in enumerate([end, start, (start + end) / 2]):
            job = [*fixed, f"{drawn.get_key_element()}={x}"]
            (done,) = self.launcher.launch([job], initial_job_idx=i)
            try:
                scores.append((float(done.return_value), x))
            except Exception:
                failed.append(done)
            if len(failed) / 3 > self.rate:
                return failed[0].return_value
        best = (min if self.direction == "minimize" else max)(scores)
        print("best", best[1], "of", sorted(scores), "failed", len(failed))
"""


def foreign(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Sweep with another package's sweeper."""
    (tmp_path / "site" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "site" / "hydra_plugins" / "drawing.py").write_text(SWEEPER)
    command = [sys.executable, "-m", "rlplug", *SWEEP, "hydra/sweeper=drawing", "algo.gamma=interval(0.8,1.2)", *words]
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_another_sweeper_counts_failures_and_maximizes(tmp_path: Path):
    done = foreign(tmp_path, "hydra.sweeper.max_failure_rate=0.5")
    assert sorted(row["status"] for row in rows()) == ["failed", "finished", "finished"]
    best = max((float(row["score"]), float(row["algo.gamma"])) for row in rows() if row["score"])
    assert f"best {best[1]} of " in done.stdout, done.stdout + done.stderr
    assert "failed 1" in done.stdout
    said = "hydra.sweeper.direction=maximize: the score of a job is the mean return of its final evaluation"
    assert f"rlplug: {said}\n" in done.stderr
    assert done.returncode == 1  # one did not finish
    assert "Traceback" not in done.stderr


def test_a_sweeper_that_ends_a_sweep_is_no_traceback(tmp_path: Path):
    done = foreign(tmp_path, "hydra.sweeper.direction=minimize")
    assert (done.returncode, [row["status"] for row in rows()]) == (1, ["failed"])
    assert "rlplug: hydra.sweeper.direction='minimize', as given: the score of a job is " in done.stderr
    assert "rlplug: the sweeper ended the sweep: more jobs failed than it accepts\n" in done.stderr
    assert "Traceback" not in done.stderr

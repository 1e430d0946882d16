"""``sweeper=optuna``: trials over seeds, pruning, and studies that are interrupted and continued."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest

from rlplug.cli import main, space, study
from rlplug.results import search

TINY = ["env=cartpole", "algo=ppo", "tuned=none", "hardware=cpu", "compile=off", "num_envs=2", "logger.only=[]"]
TINY += ["rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "eval.every=0", "eval.episodes=1"]
TINY += [
    "total_steps=64",
    "sweeper=optuna",
    "sweeper.trials=3",
    "sweeper.startup=2",
    "sweeper.every=32",
    "checkpoint.keep_best=0",
]
SEARCHED = ["algo.lr=tag(log,interval(1e-5,1e-2))", "algo.gamma=0.9,0.95,0.99"]


def loaded(folder: Path) -> optuna.Study:
    """Open a study as users of Optuna do."""
    journal = optuna.storages.journal.JournalFileBackend(str(folder / study.JOURNAL))
    return optuna.load_study(study_name=study.NAME, storage=optuna.storages.journal.JournalStorage(journal))


def trials(folder: Path) -> list[tuple[object, ...]]:
    """Return all of a study that does not depend on the clock."""
    return [
        (one.number, one.state.name, one.params, one.value, one.intermediate_values, one.user_attrs, one.system_attrs)
        for one in loaded(folder).trials
    ]


def score(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["eval/return_mean"]


def test_a_trial_is_the_mean_of_its_seeds_and_an_interrupted_study_equals_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["-m", *TINY, *SEARCHED, "seed=1,2", "sweeper.batch=2", "sweeper.workers=0"]
    assert main([*words, f"hydra.sweep.dir={tmp_path / 'whole'}"]) == 0
    out = capsys.readouterr().out
    assert "importance: " in out
    found = loaded(tmp_path / "whole").trials
    assert [one.state.name for one in found][:2] == ["COMPLETE"] * 2  # as many as sweeper.startup
    for one in found:
        scores = [score(tmp_path / f"whole/trial_{one.number:03d}/seed_{seed}") for seed in (1, 2)]
        assert one.user_attrs == {"scores": scores}
        assert one.value == pytest.approx(np.mean(scores))
        assert max(one.intermediate_values) == (32 if one.state.name == "PRUNED" else 64)
    with (tmp_path / "whole/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    finished = [row for row in rows if row["status"] == "finished"]
    assert [float(row["score"]) for row in finished] == sorted([float(r["score"]) for r in finished], reverse=True)
    assert all(float(row["low"]) <= float(row["score"]) <= float(row["high"]) for row in rows)
    for name in (search.HISTORY, search.IMPORTANCE):
        assert (tmp_path / "whole" / name).read_text().startswith("<?xml")

    train, left = study.jobs.on_this_machine, iter([False, True, False, True])

    def killed(*args: object, **options: object) -> list[Path]:
        failed = train(*args, **options)  # type: ignore[arg-type]
        if next(left, False):
            raise KeyboardInterrupt  # before its results are noted
        return failed

    monkeypatch.setattr(study.jobs, "on_this_machine", killed)
    cut = f"hydra.sweep.dir={tmp_path / 'cut'}"
    assert main([*words, cut]) == 130
    with (tmp_path / "cut" / study.JOURNAL).open("a") as file:
        file.write('{"half a record')
    assert main([*words, cut]) == 130
    assert main([*words, cut]) == 0
    assert trials(tmp_path / "cut") == trials(tmp_path / "whole")
    assert (tmp_path / "cut/sweep.csv").read_bytes() == (tmp_path / "whole/sweep.csv").read_bytes()

    capsys.readouterr()
    assert main([*words, "algo.gamma=0.9,0.95", cut]) == 2
    assert "cut has searched.algo.gamma.values=" in capsys.readouterr().err
    assert main([*words, "--json", cut]) == 0  # finished: nothing is trained
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["job"] for job in jobs] == [row["job"] for row in rows]
    assert jobs[0]["seeds"] == 2


def test_a_trial_that_fails_is_noted_and_the_study_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["-m", *TINY, "algo.lr=1e-3,1e30", "sweeper.workers=0", "sweeper.sampler=random", "sweeper.pruner=none"]
    words = [word for word in words if not word.startswith("sweeper.every")]
    assert main([*words, f"hydra.sweep.dir={tmp_path}"]) == 1
    states = {(one.params["algo.lr"], one.state.name) for one in loaded(tmp_path).trials}
    assert states == {("0.001", "COMPLETE"), ("1e+30", "FAIL")}
    printed = capsys.readouterr()
    assert "best: algo.lr=0.001" in printed.err
    assert " of 3 trials failed" in printed.err
    assert (tmp_path / search.HISTORY).exists()
    words = [word for word in words if not word.startswith("algo.lr")]
    assert main([*words, "algo.lr=1e30", "algo.gamma=0.9,0.99", "sweeper.trials=1", "hydra.sweep.dir=none"]) == 1
    assert "rlplug: no trial finished" in capsys.readouterr().err


def test_spaces_are_distributions_of_optuna():
    of = study._distribution
    assert of(space.Interval(1e-5, 1e-2, True, False)) == optuna.distributions.FloatDistribution(1e-5, 1e-2, log=True)
    assert of(space.Interval(2, 8, False, True)) == optuna.distributions.IntDistribution(2, 8)
    assert of(space.Choices(["a", "[1,2]"])) == optuna.distributions.CategoricalDistribution(["a", "[1,2]"])
    assert of(space.Range(["8", "5", "2"])) == optuna.distributions.IntDistribution(2, 8, step=3)
    assert of(space.Range(["0.5", "0.75", "1.0"])) == optuna.distributions.FloatDistribution(0.5, 1.0, step=0.25)


def test_the_picture_of_the_history_has_the_best_so_far(tmp_path: Path):
    points = [(0, 1.0, "COMPLETE"), (1, None, "FAIL"), (2, 3.0, "PRUNED"), (3, 2.0, "COMPLETE"), (4, math.inf, "FAIL")]
    text = search.draw_history(tmp_path, points, maximize=True).read_text()
    assert all(f">{label}<" in text for label in ("finished", "pruned", "best so far"))
    assert search.draw_importance(tmp_path, {"algo.lr": 0.7, "algo.gamma": 0.3}).exists()


@pytest.mark.slow
def test_a_study_killed_five_times_equals_the_undisturbed_one(tmp_path: Path):
    words = ["-m", *TINY, *SEARCHED, "sweeper.trials=12", "sweeper.startup=4", "sweeper.batch=2", "sweeper.workers=0"]

    def start(folder: Path) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "rlplug", *words, f"hydra.sweep.dir={folder}"]
        return subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "whole").wait(1800) == 0
    whole_s, rng, kills = time.monotonic() - began, random.Random(time.time_ns()), 0
    while kills < 5:
        process = start(tmp_path / "killed")
        time.sleep(rng.uniform(0.05, 0.3) * whole_s)
        kills += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed").wait(1800) == 0
    whole = trials(tmp_path / "whole")
    assert {one[1] for one in whole} == {"COMPLETE", "PRUNED"}
    assert trials(tmp_path / "killed") == whole


def test_a_run_ends_with_the_sweep_that_started_it(tmp_path: Path):
    """Otherwise a sweep that is continued after a kill would meet runs of its own that still train."""
    words = ["train", "env=cartpole", "algo=ppo", "total_steps=1_000_000", f"hydra.run.dir={tmp_path / 'run'}"]
    killed = str(os.getppid())  # not the parent of the run
    assert subprocess.run([sys.executable, "-m", "rlplug.cli.jobs", killed, *words], timeout=120).returncode == 1
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["sweeper.trials=0"], "sweeper.trials: 0 is out of range"),
        (["sweeper.trial=3"], "did you mean sweeper.trials?"),
        (["sweeper.every=64"], "sweeper.every: 64 leaves nothing to prune in total_steps=64"),
        (["sweeper.pruner=none"], "sweeper.every: is the interval of a pruner; choose sweeper.pruner=median"),
        (["sweeper.pruner=best"], "sweeper.pruner"),
        (["seed=interval(1,3)"], "seed: is not searched: seed=1,2,3 trains three seeds of every trial"),
        (["seed=1,1"], "seed: [1, 1] has a seed twice"),
        (["algo.lr=interval(1e-2,1e-5)"], "algo.lr: interval(0.01,1e-05) is empty: write the smaller end first"),
        (["algo.gamma=0.9,2"], "algo.gamma: 2 is out of range"),
        (["stop={env_steps: 3}"], "stop: is set by optuna when it prunes"),
        (["sweeper=optune"], "sweeper: there is no sweeper 'optune'; did you mean optuna? There are: optuna, pbt"),
        (["~algo.lr", "~algo.gamma"], "sweeper: optuna needs settings to search, as in 'algo.lr=interval(1e-5,1e-2)'"),
    ],
)
def test_bad_input_is_one_message_before_anything_is_written(tmp_path, capsys, changed, said):
    keys = [word.partition("=")[0].lstrip("~") for word in changed]
    words = [word for word in [*TINY, *SEARCHED] if word.partition("=")[0] not in keys]
    given = [word for word in changed if not word.startswith("~")]
    assert main(["-m", *words, *given, f"hydra.sweep.dir={tmp_path / 'study'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "study").exists()


def test_optuna_is_an_extra(tmp_path: Path):
    """Without the package, the extra is named before anything is written."""
    line = "import sys; sys.modules['optuna'] = None; from rlplug.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["-m", *TINY, *SEARCHED, f"hydra.sweep.dir={tmp_path / 'study'}"]
    done = subprocess.run([sys.executable, "-c", line, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("rlplug: sweeper: 'optuna' is not installed (")
    assert done.stderr.endswith("): pip install 'rlplug[optuna]'\n")
    assert not (tmp_path / "study").exists()

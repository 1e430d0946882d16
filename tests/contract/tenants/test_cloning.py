"""A loop that collects nothing and counts updates: behavioral cloning from rows in memory."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from rlplug.checkpointing.format import checkpoints
from rlplug.cli import main
from rlplug.config import compose
from rlplug.run.build import resolve
from rlplug.testing import conformance
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError
from tests.contract.tenants.cloning import FILES
from tests.installing import install, site  # noqa: F401  fixtures

CLONE = ("algo=cloning", "env=cartpole", "hardware=cpu", "logger.only=[]", "model.hidden=[32]", "eval.episodes=10")
RANDOM = 22.0  # return of random actions


@pytest.fixture
def cloning(install, site):  # noqa: F811
    install("rlplug-cloning", "rlplug_cloning", FILES)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), os.getcwd()])}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def rows(run: Path, name: str) -> dict[int, float]:
    with (run / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_an_expert_is_cloned_and_updates_are_counted(cloning, tmp_path, capsys):
    run = tmp_path / "run"
    words = (*CLONE, "checkpoint.keep_last=9", f"hydra.run.dir={run}")
    assert main(["check", *words]) == 0
    assert "total_steps=600" in capsys.readouterr().out
    assert main([*words]) == 0
    told, returns = summary(run), rows(run, "eval/return_mean")
    with capsys.disabled():
        print(f"return of behavioral cloning by update: {returns}")
    assert returns.keys() == {200, 400, 600}
    assert told["eval/return_mean"] == returns[600] > 8 * RANDOM
    assert (told["env_steps"], told["updates"], told["eval/updates"]) == (0, 600, 600)
    assert told["updates_per_s"] > 0
    lr = rows(run, "train/lr")
    assert [*lr] == [100, 200, 300, 400, 500, 600]
    assert lr[100] == pytest.approx(0.003 * (1 - 49.5 / 600), rel=1e-3)  # its schedule counts updates
    assert rows(run, "time/updates_per_s").keys() == lr.keys()
    assert not rows(run, "time/env_steps_per_s")
    assert {path.name for path in checkpoints(run)} >= {"step_000000000150", "step_000000000600"}
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert (judged["updates"], judged["eval/return_mean"]) == (600, told["eval/return_mean"])


def test_given_more_updates_it_goes_on(cloning, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    words = (*CLONE, "checkpoint.every=110", "checkpoint.keep_best=0", "log.every=37", "eval.episodes=2")
    assert main([*words, "total_steps=300", f"hydra.run.dir={one}"]) == 0
    assert main([*words, "total_steps=120", f"hydra.run.dir={two}"]) == 0
    capsys.readouterr()
    assert main(["resume", str(two)]) == 0
    assert "has finished: 120 updates" in capsys.readouterr().err
    assert main(["resume", str(two), "total_steps=119"]) == 2
    assert "total_steps: 119 is less than the 120 updates" in capsys.readouterr().err
    assert main(["resume", str(two), "total_steps=300"]) == 0
    assert "continuing from update 120" in capsys.readouterr().err
    assert differences_of_runs(one, two) == []


def test_it_passes_the_kit(cloning):
    """What is asked of buffers with rows of their own, and of loops that collect nothing."""
    checks = {str(check): check for check in conformance.checks("rlplug-cloning")}
    for name in ("buffer-experts-stored", "buffer-experts-resumes", "loop-study-run", "loop-study-resumes"):
        checks.pop(name)()
    for what in ("learns", "act", "ranks"):
        checks.pop(f"algo-cloning-{what}-cartpole")()
    others = {f"algo-cloning-{what}-cartpole" for what in conformance.OF_ALGORITHM}
    settings = {f"{what}-settings" for what in ("algo-cloning", "buffer-experts", "loop-study")}
    assert checks.keys() - others == settings, "streams of rows are no check of such a buffer"


REFUSED = {
    "a loop that collects nothing, and a buffer that waits for it": (
        ("algo=dqn", "loop=study"),
        "loop: study does not collect, but replay stores collected rows; use buffer=experts or loop=alternate or async",
    ),
    "a loop that collects, and a buffer with its own rows": (
        ("algo=cloning", "loop=alternate"),
        "loop: alternate collects, but experts brings its own rows; use buffer=her or prioritized or replay "
        "or loop=study",
    ),
    "a loop and an algorithm": (
        ("algo=ppo", "loop=study"),
        "loop: study learns from an expert's data, which the algorithm cannot; use loop=alternate or episodes",
    ),
    "a setting of the run": (
        ("algo=ppo", "loop.replay_ratio=1"),
        "loop.replay_ratio: unknown key; did you mean replay_ratio?",
    ),
    "a setting of the run, added": (
        ("algo=ppo", "+loop.rollout_fragment_length=1"),
        "loop.rollout_fragment_length: unknown key; did you mean rollout_fragment_length?",
    ),
    "a setting of the run in another node": (
        ("algo=ppo", "algo.train_batch_size=1"),
        "algo.train_batch_size: unknown key; did you mean train_batch_size?",
    ),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_said(cloning, words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(compose([*words, "env=cartpole", "hardware=cpu", "logger.only=[]"]))
    assert str(refused.value) == said

"""Runs with actors as a user starts, kills, continues and sweeps them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplug.cli import main
from rlplug.testing.comparing import differences_of_runs

PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=4", "model.hidden=[16]", "logger=[]"),
    *("total_steps=2400", "loop.rollout_fragment_length=40", "algo.sgd_minibatch_size=40", "algo.num_sgd_iter=2"),
    *("log.every=400", "eval.every=800", "eval.episodes=2", "checkpoint.every=800", "hardware=cpu"),
    *("hardware.actors.count=2", "hardware.actors.num_cpus=0.5"),
)


def rlplug(*words: str) -> subprocess.Popen[str]:
    """A Ray that the environment names, but the run does not, is not joined: here it could not be."""
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    return subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path):
    """The whole program is killed; continued, it ends as the one that was left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert rlplug(*PPO, f"hydra.run.dir={whole}").wait() == 0
    program = rlplug(*PPO, f"hydra.run.dir={killed}")
    while program.poll() is None and not list(killed.glob("checkpoints/step_*[0-9]")):
        time.sleep(0.01)
    program.kill()
    program.communicate()
    assert not (killed / "summary.json").exists()
    resumed = rlplug("resume", str(killed))
    _, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert differences_of_runs(whole, killed) == []


def test_other_actors_than_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = (*PPO, "total_steps=200", "eval.every=0", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words, "hardware.actors.count=0"]) == 0
    assert main(["resume", str(tmp_path / "run"), "total_steps=400", "hardware.actors.count=2"]) == 2
    said = "hardware.actors.count: the run was collected by none, and continues with as many; here are 2"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("hardware=2cpu",), pytest.param(("hardware.actors.evaluation=1",), marks=pytest.mark.slow)],
    ids=["two ranks", "evaluation beside"],
)
def test_other_shapes_of_the_same_run(tmp_path: Path, words: tuple[str, ...]):
    program = rlplug(*PPO, *words, f"hydra.run.dir={tmp_path / 'run'}")
    _, said = program.communicate()
    assert program.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval/env_steps"] == summary["env_steps"] > 2300
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    name = rows[0].split(",").index("eval/return_mean")
    assert sum(bool(row.split(",")[name]) for row in rows[1:]) == 3

"""Collection by shards: a loop that takes what is ready first, with one actor that is five times slower."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplug.checkpointing.reading import checkpoints
from rlplug.cli import main
from tests.contract.tenants.asynchronous import FILES
from tests.installing import install, site  # noqa: F401  fixtures

DQN = (
    *("algo=dqn", "env=uneven", "loop=eager", "hardware=cpu", "logger=[]", "model.hidden=[16]", "train_batch_size=16"),
    *("rollout_fragment_length=10", "replay_ratio=0.05", "eval.every=0", "eval.episodes=1", "log.every=200"),
    *("num_steps_sampled_before_learning_starts=0", "hardware.actors.num_cpus=0.25", "hardware.actors.backoff_s=0.1"),
)


@pytest.fixture
def eager(install, site):  # noqa: F811
    install("rlplug-eager", "rlplug_eager", FILES)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), os.getcwd()])}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open() as file:
        return [int(row["env_steps"]) for row in csv.DictReader(file)]


def test_staleness_is_measured_and_steps_are_exact(eager, tmp_path):
    words = (*DQN, "num_envs=2", "hardware.actors.count=2", "total_steps=1000", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words]) == 0
    assert summary(tmp_path / "run")["env_steps"] <= 1000
    with (tmp_path / "run" / "metrics.csv").open() as file:
        stale = [float(row["train/staleness"]) for row in csv.DictReader(file) if row.get("train/staleness")]
    assert stale
    assert max(stale) > 0


@pytest.mark.slow
def test_four_actors_one_of_them_slow(eager, tmp_path):
    """The loop that takes what is ready does not wait for the slow actor, which the other one does."""
    rates = {}
    for name, shards in (("all", "null"), ("first", "1")):
        run = tmp_path / name
        more = ("num_envs=4", "hardware.actors.count=4", "total_steps=12000", "env.seconds=0.004", "replay_ratio=0.002")
        assert main([*DQN, *more, f"loop.shards={shards}", f"hydra.run.dir={run}"]) == 0
        rates[name] = summary(run)["env_steps_per_s"]
    faster = rates["first"] / rates["all"]
    print(f"steps/s: waiting {rates['all']:.0f}, first ready {rates['first']:.0f}: {faster:.2f} x")


def test_killed_and_resumed_no_step_is_lost_or_doubled(eager, tmp_path):
    run = tmp_path / "run"
    words = (*DQN, "num_envs=2", "hardware.actors.count=2", "total_steps=3000", "checkpoint.every=100")
    program = subprocess.Popen(
        [sys.executable, "-m", "rlplug", *words, f"hydra.run.dir={run}"], env=eager, stderr=subprocess.PIPE, text=True
    )
    while program.poll() is None and len(list(run.glob("checkpoints/step_*[0-9]"))) < 2:
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    _, printed = program.communicate()
    assert program.returncode == -signal.SIGKILL, printed
    newest = checkpoints(run)[-1]
    again = [sys.executable, "-m", "rlplug", "resume", str(run)]
    done = subprocess.run(again, env=eager, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = summary(run)
    rows = steps(run)
    assert rows == sorted(rows)
    assert 3000 - 2 < ended["env_steps"] <= 3000
    assert newest

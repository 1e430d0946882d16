"""Collection by shards: a loop that takes what is ready first, with one actor that is five times slower."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlplug.cli import main
from rlplug.testing import conformance
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


def test_the_loop_passes_the_kit(eager):
    for check in conformance.checks("rlplug-eager", kinds=["loop"]):
        check()


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def numbers(run: Path) -> dict[int, list[int]]:
    """Return the numbers of the steps that count, by shard: a resumed run takes back what came after its checkpoint."""
    kept: list[dict] = []
    for entry in map(json.loads, (run / "diary.jsonl").read_text().splitlines()):
        if entry["shard"] is None:
            kept = [before for before in kept if before["env_steps"] <= entry["env_steps"]]
        else:
            kept.append(entry)
    found: dict[int, list[int]] = {}
    for entry in kept:
        ((obs,), (valid,)) = entry["obs"], entry["valid"]
        found.setdefault(entry["shard"], []).extend(int(n) for n, counts in zip(obs, valid, strict=True) if counts)
    return found


def test_staleness_is_measured_and_steps_are_exact(eager, tmp_path):
    words = (*DQN, "num_envs=2", "hardware.actors.count=2", "total_steps=1000", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words]) == 0
    assert summary(tmp_path / "run")["env_steps"] <= 1000
    with (tmp_path / "run" / "metrics.csv").open() as file:
        stale = [float(row["train/staleness"]) for row in csv.DictReader(file) if row.get("train/staleness")]
    assert stale
    assert max(stale) > 0


def test_a_loop_may_ask_for_more_shards_than_there_are(eager, tmp_path):
    """One process is one shard, and the run still takes exactly its ``total_steps``."""
    words = (*DQN, "env=cartpole", "num_envs=1", "total_steps=1000", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words, "loop.shards=3", "loop.in_flight=1"]) == 0
    assert summary(tmp_path / "run")["env_steps"] == 1000


@pytest.mark.slow
def test_four_actors_one_of_them_slow(eager, tmp_path):
    """The loop that takes what is ready does not wait for the slow actor, which the other one does."""
    rates = {}
    for name, shards in (("all", "null"), ("first", "1")):
        run = tmp_path / name
        words = (*DQN, "num_envs=4", "hardware.actors.count=4", "total_steps=4000", "rollout_fragment_length=50")
        words = (*words, "env.seconds=0.01", "replay_ratio=0.002")  # so slow that other processes hardly matter
        assert main([*words, f"loop.shards={shards}", f"hydra.run.dir={run}"]) == 0
        rates[name] = summary(run)["env_steps_per_s"]
    faster = rates["first"] / rates["all"]
    print(f"steps/s: waiting {rates['all']:.0f}, first ready {rates['first']:.0f}: {faster:.2f} x")


@pytest.mark.slow
@pytest.mark.parametrize("envs", [4, 3], ids=["shares", "replicated"])
def test_ranks_take_as_many_segments_each(eager, tmp_path, envs):
    """Rounds of two ranks pair up although one has the slow actor; of three environments the first rank plays all."""
    run = tmp_path / "run"
    words = (*DQN, "hardware=2cpu", f"num_envs={envs}", f"hardware.actors.count={envs}", "total_steps=1000")
    command = [sys.executable, "-m", "rlplug", *words, f"hydra.run.dir={run}"]
    done = subprocess.run(command, env=eager, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 1000 - envs < summary(run)["env_steps"] <= 1000


@pytest.mark.parametrize("victim", ["run", "actor"])
def test_killed_no_step_is_lost_or_doubled(eager, tmp_path, victim):
    run = tmp_path / "run"
    words = (*DQN, "env.id=tests.contract.tenants.asynchronous:Numbered-v0", "logger=[diary]", "num_envs=2")
    words = (*words, "hardware.actors.count=2", "total_steps=3000", "checkpoint.every=100", f"hydra.run.dir={run}")
    program = subprocess.Popen([sys.executable, "-m", "rlplug", *words], env=eager, stderr=subprocess.PIPE, text=True)
    while program.poll() is None and len(list(run.glob("checkpoints/step_*[0-9]"))) < 2:
        time.sleep(0.01)
    if victim == "run":
        program.kill()
    else:
        children = psutil.Process(program.pid).children(recursive=True)
        next(child for child in children if "ray::Actor" in " ".join(child.cmdline()[:1])).kill()
    _, printed = program.communicate()
    if victim == "run":
        again = [sys.executable, "-m", "rlplug", "resume", str(run)]
        done = subprocess.run(again, env=eager, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert program.returncode == 0, printed
        assert "its process died" in printed
    steps = numbers(run)
    assert steps.keys() == {0, 1}
    for shard in steps.values():
        assert shard == [i % 7 for i in range(len(shard))]  # one that is lost or doubled would break the order
    assert len(steps[1]) > len(steps[0])  # the fast one does not wait
    assert sum(map(len, steps.values())) == summary(run)["env_steps"] == 3000

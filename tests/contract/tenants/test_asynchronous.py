"""``loop=async`` with actors, one of which is five times slower: it waits for none, and counts every step once."""

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
from tests.actors.conftest import cluster  # noqa: F401  a fixture
from tests.contract.tenants.asynchronous import FILES
from tests.installing import install, site  # noqa: F401  fixtures

COMMON = (
    *("env=uneven", "loop=async", "hardware=cpu", "logger.only=[]", "model.hidden=[16]", "train_batch_size=16"),
    *("rollout_fragment_length=10", "eval.every=0", "eval.episodes=1", "log.every=200", "num_envs=2"),
    *("num_steps_sampled_before_learning_starts=0", "hardware.actors.num_cpus=0.25", "hardware.actors.backoff_s=0.1"),
)
REPLAY = ("algo=dqn", "replay_ratio=0.05", *COMMON)
SEGMENTS = ("algo=impala", "tuned=none", *COMMON)
APEX = (
    *("algo=apex_dqn", "tuned=none", "replay_ratio=0.05", *COMMON, "algo.hiddens=[16]", "buffer.num_shards=2"),
    *("loop.in_flight=2", "loop.max_weight_sync_delay=40"),
)
APPO = ("algo=appo", *SEGMENTS[1:])
A3C = ("algo=a3c", *SEGMENTS[1:], "train_batch_size=10")
APEX_DDPG = (
    *("algo=apex_ddpg", *(word for word in APEX[1:] if not word.startswith("algo."))),
    "env.id=tests.contract.tenants.asynchronous:NumberedBox-v0",
)
ACTORS = ("hardware.actors.count=2",)


@pytest.fixture
def uneven(install, site):  # noqa: F811
    install("rlplug-uneven", "rlplug_uneven", FILES)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), os.getcwd()])}


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


def column(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("words", [pytest.param(REPLAY, marks=pytest.mark.slow), SEGMENTS], ids=["replay", "segments"])
def test_age_and_idle_shares_are_measured_and_steps_are_exact(uneven, tmp_path, words):
    run = tmp_path / "run"
    assert main([*words, *ACTORS, "total_steps=1000", f"hydra.run.dir={run}"]) == 0
    assert summary(run)["env_steps"] <= 1000
    assert max(column(run, "train/staleness")) > 0
    assert max(column(run, "train/staleness_steps")) > 0
    for who in ("learner", "actors"):
        shares = column(run, f"time/{who}_idle")
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert len(shares) >= 4
        assert max(shares) > 0.0


@pytest.mark.usefixtures("cluster")
def test_what_is_older_than_the_bound_is_left_out(uneven, tmp_path):
    """The slow actor's segments are always too old: the fast one makes several updates meanwhile."""
    run = tmp_path / "run"
    words = (*SEGMENTS, *ACTORS, "logger.only=[diary]", "env.factor=20.0", "loop.max_staleness=1", "total_steps=2000")
    assert main([*words, f"hydra.run.dir={run}"]) == 0
    assert max(column(run, "train/too_stale")) > 0
    assert max(column(run, "train/age")) <= 1.0
    counted = sum(map(len, numbers(run).values()))
    assert counted == summary(run)["env_steps"] <= 2000


def test_a_loop_may_ask_for_more_shards_than_there_are(uneven, tmp_path):
    """One process is one shard, and the run still takes exactly its ``total_steps``."""
    words = (*REPLAY, "env=cartpole", "num_envs=1", "total_steps=1000", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words, "loop.shards=3", "loop.in_flight=1"]) == 0
    assert summary(tmp_path / "run")["env_steps"] == 1000


@pytest.mark.slow
@pytest.mark.parametrize("envs", [4, 3], ids=["shares", "replicated"])
def test_ranks_take_as_many_segments_each(uneven, tmp_path, envs):
    """Rounds of two ranks pair up although one has the slow actor; of three environments the first rank plays all."""
    run = tmp_path / "run"
    words = (*REPLAY, "hardware=2cpu", f"num_envs={envs}", f"hardware.actors.count={envs}", "total_steps=1000")
    command = [sys.executable, "-m", "rlplug", *words, f"hydra.run.dir={run}"]
    done = subprocess.run(command, env=uneven, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 1000 - envs < summary(run)["env_steps"] <= 1000


@pytest.mark.slow
def test_ranks_update_together_although_one_leaves_out_more(uneven, tmp_path):
    """The slow actor's segments are too old for the first rank; the second one waits for it."""
    run = tmp_path / "run"
    words = (*SEGMENTS, "hardware=2cpu", "num_envs=4", "hardware.actors.count=4", "total_steps=2000")
    words = (*words, "train_batch_size=32", "env.factor=20.0", "loop.max_staleness=1", f"hydra.run.dir={run}")
    command = [sys.executable, "-m", "rlplug", *words]
    done = subprocess.run(command, env=uneven, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 1996 < summary(run)["env_steps"] <= 2000
    assert summary(run)["updates"] > 10


@pytest.mark.parametrize("victim", [pytest.param("run", marks=pytest.mark.slow), "actor"])
@pytest.mark.parametrize(
    "words",
    [REPLAY, *(pytest.param(words, marks=pytest.mark.slow) for words in (SEGMENTS, APPO, A3C, APEX, APEX_DDPG))],
    ids=["replay", "segments", "appo", "a3c", "apex", "apex-ddpg"],
)
def test_killed_no_step_is_lost_or_doubled(uneven, tmp_path, victim, words):
    run = tmp_path / "run"
    words = ("env.id=tests.contract.tenants.asynchronous:Numbered-v0", *words, *ACTORS, "logger.only=[diary]")
    words = (*words, "total_steps=1000", "checkpoint.every=100", f"hydra.run.dir={run}")
    said = (tmp_path / "stderr").open("w+")  # no pipe: processes of Ray would keep it open for a while
    program = subprocess.Popen([sys.executable, "-m", "rlplug", *words], env=uneven, stderr=said)
    while program.poll() is None and len(list(run.glob("checkpoints/step_*[0-9]"))) < 2:
        time.sleep(0.01)
    if victim == "run":
        program.kill()
    else:
        children = psutil.Process(program.pid).children(recursive=True)
        next(child for child in children if "ray::Actor" in " ".join(child.cmdline()[:1])).kill()
    program.wait()
    said.seek(0)
    printed = said.read()
    if victim == "run":
        again = [sys.executable, "-m", "rlplug", "resume", str(run)]
        done = subprocess.run(again, env=uneven, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert program.returncode == 0, printed
        assert "its process died" in printed
    steps = numbers(run)
    assert steps.keys() == {0, 1}
    for shard in steps.values():
        assert shard == [i % 7 for i in range(len(shard))]  # one that is lost or doubled would break the order
    assert sum(map(len, steps.values())) == summary(run)["env_steps"] == 1000

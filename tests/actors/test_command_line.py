"""Runs with actors as a user starts, kills and resumes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlplug.cli import main
from rlplug.testing.comparing import differences_of_runs
from tests.hardware.test_command_line import rank

PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=4", "model.hidden=[16]", "logger.only=[]"),
    *("total_steps=2400", "rollout_fragment_length=40", "algo.sgd_minibatch_size=40", "algo.num_sgd_iter=2"),
    *("log.every=400", "eval.every=800", "eval.episodes=2", "checkpoint.every=800", "hardware=cpu"),
    *("hardware.actors.count=2", "hardware.actors.num_cpus=0.5"),
)
TWO_MACHINES = """
import rlplug.actors
from ray.cluster_utils import Cluster
machine = {"num_cpus": 2, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=machine | {"include_dashboard": False})
other = cluster.add_node(**machine)
print(cluster.address, other.all_processes["raylet"][0].process.pid, flush=True)
input()
cluster.shutdown()
"""


def rlplug(*words: str) -> subprocess.Popen[str]:
    """Start a run. It must not join the cluster of RAY_ADDRESS, which does not exist: the configuration names none."""
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    return subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path):
    """A killed run that is resumed ends exactly as an undisturbed one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert rlplug(*PPO, f"hydra.run.dir={whole}").wait() == 0
    program = rlplug(*PPO, f"hydra.run.dir={killed}")
    while program.poll() is None and not list(killed.glob("checkpoints/step_*[0-9]")):
        time.sleep(0.01)
    program.kill()
    program.communicate()
    assert not (killed / "summary.json").exists()
    resumed = rlplug("resume", str(killed))
    _, printed = resumed.communicate()
    assert resumed.returncode == 0, printed
    assert differences_of_runs(whole, killed) == []


@pytest.mark.slow
def test_a_cluster_that_is_lost_ends_the_run(tmp_path: Path):
    """By default Ray would try for a minute to reach its GCS."""
    run = tmp_path / "run"
    program = rlplug(*PPO, "total_steps=10_000_000", f"hydra.run.dir={run}")
    while program.poll() is None and not list(run.glob("checkpoints/step_*[0-9]")):
        time.sleep(0.01)
    started = psutil.Process(program.pid).children(recursive=True)
    (gcs,) = (process for process in started if process.name() == "gcs_server")
    gcs.kill()
    _, printed = program.communicate()
    said = "rlplug: this run, or Ray on this machine, was killed, and both ended; resume continues it"
    assert (program.returncode, printed.splitlines()[-1]) == (1, said)
    assert "Failed to connect to GCS within 5 seconds" in printed
    psutil.wait_procs(started)
    assert not [process for process in started if process.is_running()]


def test_resumed_with_another_number_of_actors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It is refused before any is started, as here none could be."""
    words = (*PPO, "total_steps=200", "eval.every=0", f"hydra.run.dir={tmp_path / 'run'}")
    assert main([*words, "hardware.actors.count=0"]) == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    assert (
        main(["resume", str(tmp_path / "run"), "total_steps=400", "schedules=stretch", "hardware.actors.count=2"]) == 2
    )
    message = "hardware.actors.count: the run was collected with no actors and must continue with them; it now has 2"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("hardware=2cpu",), pytest.param(("hardware.actors.evaluation=1",), marks=pytest.mark.slow)],
    ids=["two ranks", "evaluation actors"],
)
def test_other_shapes_of_the_same_run(tmp_path: Path, words: tuple[str, ...]):
    program = rlplug(*PPO, *words, f"hydra.run.dir={tmp_path / 'run'}")
    _, printed = program.communicate()
    assert program.returncode == 0, printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval/env_steps"] == summary["env_steps"] > 2300
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    name = rows[0].split(",").index("eval/return_mean")
    assert sum(bool(row.split(",")[name]) for row in rows[1:]) == 3


def actor_of(rank: psutil.Process) -> psutil.Process:
    """Return the actor to whose server the process of a rank is connected."""
    asked = {at.raddr.port for at in rank.net_connections() if at.status == "ESTABLISHED"}
    for process in psutil.Process(rank.ppid()).children(recursive=True):
        listening = {at.laddr.port for at in process.net_connections() if at.status == "LISTEN"}
        if "ray::Actor" in "".join(process.cmdline()[:1]) and asked & listening:
            return process
    raise AssertionError("it has no actor")


@pytest.mark.slow
def test_the_first_ranks_actor_that_ends_a_run_of_two_ranks_is_named(tmp_path: Path):
    """The first rank has the cluster, and the other rank dies with it."""
    run = tmp_path / "run"
    words = (*PPO, "hardware=2cpu", "hardware.actors.on_failure=stop", "total_steps=1e7", "eval.every=0")
    program = rlplug(*words, f"hydra.run.dir={run}")
    while program.poll() is None and not list(run.glob("checkpoints/step_*[0-9]")):
        time.sleep(0.1)
    actor_of(rank(program, 0)).kill()
    _, printed = program.communicate()
    assert program.returncode == 1
    message = rf"rlplug: actor 0 \(environments 0-1\): its process died .*; continue with: .* resume {run}"
    assert re.fullmatch(message, printed.splitlines()[-1]), printed


@pytest.mark.slow
def test_a_run_whose_raylet_dies_says_so(tmp_path: Path):
    program = rlplug(*PPO, "total_steps=100_000", f"hydra.run.dir={tmp_path / 'run'}")
    while program.poll() is None and not (tmp_path / "run" / "metrics.csv").exists():
        time.sleep(0.05)
    (raylet,) = [one for one in psutil.Process(program.pid).children(recursive=True) if one.name() == "raylet"]
    raylet.kill()
    _, printed = program.communicate()
    assert program.returncode != 0
    said = "rlplug: this run, or Ray on this machine, was killed, and both ended; resume continues it"
    assert said in printed.splitlines()


@pytest.mark.slow
def test_an_actor_whose_machine_is_lost_plays_on_another_one(tmp_path: Path):
    """Ray ends a machine's raylet with its runtime environment agent, and every actor on that machine with it."""
    run = tmp_path / "run"
    command = [sys.executable, "-c", TWO_MACHINES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout is not None
        address, raylet = cluster.stdout.readline().split()
        words = ("hardware.actors.num_cpus=1", "total_steps=20_000", f"hardware.ray.address={address}")
        program = rlplug(*PPO, *words, f"hydra.run.dir={run}")
        while program.poll() is None and not list(run.glob("checkpoints/step_*[0-9]")):
            time.sleep(0.05)
        there = {" ".join(one.cmdline()[:1]).partition(".")[0]: one for one in psutil.Process(int(raylet)).children()}
        assert "ray::Actor" in there
        there["ray::RuntimeEnvAgent"].kill()
        _, printed = program.communicate()
        cluster.communicate("\n")
    assert program.returncode == 0, printed
    assert re.search(r"rlplug: actor \d \(environments \d-\d\): its machine was lost", printed), printed
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"

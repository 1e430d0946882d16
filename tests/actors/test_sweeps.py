"""Sweepers whose runs train on the machines of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplug.cli import jobs, main
from tests.actors.test_command_line import TWO_MACHINES
from tests.cli.test_pbt import TINY, require_equal

WORDS = ["-m", *TINY, "sweeper.members=2"]


def test_a_sweep_on_ray_equals_one_in_this_process(cluster: str, tmp_path: Path):
    assert main([*WORDS, "sweeper.workers=0", f"hydra.sweep.dir={tmp_path / 'here'}"]) == 0
    assert main([*WORDS, f"sweeper.ray.address={cluster}", f"hydra.sweep.dir={tmp_path / 'ray'}"]) == 0
    require_equal(tmp_path / "here", tmp_path / "ray")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweeper.ray.num_cpus=1000"], "sweeper.ray.num_cpus: 1000 CPU cores are more than the "),
        (["sweeper.ray.num_gpus=1"], "sweeper.ray.num_gpus: 1 CUDA devices are more than the 0 of the cluster's"),
        (["sweeper.workers=0"], "sweeper.workers: 0 trains in this process; leave it out to train on"),
        (["sweeper.ray.num_cpus=0"], "sweeper.ray.num_cpus: 0 is out of range: should be greater than 0"),
        (["sweeper.ray.num_cpu=1"], "sweeper.ray.num_cpu: unknown key; did you mean sweeper.ray.num_cpus?"),
        (["sweeper.every.x=1"], "sweeper.every: {'x': 1} has the wrong type: should be a valid integer"),
    ],
)
def test_bad_input_is_one_message(
    words: list[str], said: str, cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    given = [*WORDS, f"sweeper.ray.address={cluster}", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(given) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_run_that_cannot_be_started_says_why(
    cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As on a machine that lacks the shared folder."""
    monkeypatch.setattr(jobs, "log", lambda folder: Path("/proc/nowhere") / folder.name)
    words = [*WORDS, f"sweeper.ray.address={cluster}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(words) == 1
    said = capfd.readouterr().err
    assert "member_0: [Errno 2] No such file or directory: '/proc/nowhere'; the machines of the cluster need" in said
    assert "all members failed" in said


@pytest.mark.slow
def test_members_train_on_two_machines_of_which_one_is_lost(tmp_path: Path):
    """Each member takes a whole machine, so one of them continues on the other machine."""
    longer = [*WORDS, "total_steps=6144", "sweeper.every=2048"]
    assert main([*longer, "sweeper.workers=0", f"hydra.sweep.dir={tmp_path / 'whole'}"]) == 0
    command = [sys.executable, "-c", TWO_MACHINES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as machines:
        assert machines.stdout is not None
        address, raylet = machines.stdout.readline().split()
        on_ray = [f"sweeper.ray.address={address}", "sweeper.ray.num_cpus=2", f"hydra.sweep.dir={tmp_path / 'ray'}"]
        sweep = subprocess.Popen([sys.executable, "-m", "rlplug", *longer, *on_ray])
        while sweep.poll() is None and len(list(tmp_path.glob("ray/round_001/member_*"))) < 2:
            time.sleep(0.01)
        os.kill(int(raylet), signal.SIGKILL)
        assert sweep.wait() == 0
        refused = [f"sweeper.ray.address={address}".rpartition(":")[0] + ":1", f"hydra.sweep.dir={tmp_path / 'none'}"]
        done = subprocess.run([sys.executable, "-m", "rlplug", *longer, *refused], capture_output=True, text=True)
        assert (done.returncode, "sweeper.ray.address: no Ray cluster answers at" in done.stderr) == (2, True)
        machines.communicate("\n")
    require_equal(tmp_path / "whole", tmp_path / "ray")

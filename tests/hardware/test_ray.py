"""Ranks on a Ray cluster, as a user starts and stops them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from rlplug.config import compose
from rlplug.run import launch
from rlplug.types import ConfigError
from tests.hardware.test_command_line import PPO, disturb, require_equal, start

ON_RAY = (*PPO, "hardware=ray", "hardware.devices=2")


def ranks(program: subprocess.Popen[str]) -> list[psutil.Process]:
    mine = psutil.Process(program.pid).children(recursive=True)
    return [p for p in mine if p.cmdline() and p.cmdline()[0].startswith("ray::rank ")]


@pytest.mark.slow
def test_stopped_and_resumed_it_equals_the_run_of_two_processes(tmp_path: Path, undisturbed: Path):
    run = tmp_path / "run"
    code, printed = disturb(run, ON_RAY, lambda program: program.send_signal(signal.SIGINT))
    assert code == 130, printed
    assert "stopping after this round, with a checkpoint" in printed
    program = start("resume", str(run))
    _, printed = program.communicate(timeout=200)
    assert program.returncode == 0, printed
    require_equal(undisturbed, run)


@pytest.mark.slow
def test_a_killed_rank_is_restarted(tmp_path: Path, undisturbed: Path):
    run = tmp_path / "run"
    words = (*ON_RAY, "hardware.max_restarts=1")
    code, printed = disturb(run, words, lambda program: os.kill(ranks(program)[1].pid, signal.SIGKILL))
    assert code == 0, printed
    assert "restarting automatically; restarts left: 0" in printed
    require_equal(undisturbed, run)


def test_more_ranks_than_the_cluster_has(tmp_path: Path):
    words = (*PPO, "hardware=ray", "hardware.devices=4", "hardware.ray.num_cpus=1000")
    match = r"hardware.devices: 4 ranks with 1000 cores each need more than the \d+ of this machine; use hardware.ray"
    with pytest.raises(ConfigError, match=match):
        launch.train(compose(words), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ray_chooses_the_machines():
    with pytest.raises(ConfigError, match=r"hardware.num_nodes: does not apply to Ray, which chooses the machines"):
        compose((*ON_RAY, "hardware.num_nodes=2")).hardware.build(None).plan()


def test_slurm_jobs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    chosen = compose((*PPO, "hardware=slurm")).hardware
    with pytest.raises(ConfigError, match="hardware: this process is in no SLURM job"):
        chosen.build(None).plan()
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(
        ConfigError, match="hardware: the job has 7 tasks, and this process is none of them: start it with srun"
    ):
        chosen.build(None).plan()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(ConfigError, match="7 tasks on 2 machines: every machine needs the same number"):
        chosen.build(None).plan()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 tasks are on this machine, and each sees one CUDA device instead of all"):
        chosen.build(None).plan()
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "3,1")
    with pytest.raises(ConfigError, match="4 tasks on 2 machines: every machine needs the same number"):
        chosen.build(None).plan()

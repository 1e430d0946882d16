"""Runs on two ranks as a user starts, kills, stops and resumes them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlplug.cli import main
from rlplug.config import compose
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.distributed.fabric import launched_elsewhere
from rlplug.run.build import build
from rlplug.testing.comparing import compare_runs
from tests.tools.kill import Process, warm_up

PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=4", "hardware=2cpu", "model.hidden=[16]"),
    *("total_steps=1600", "rollout_fragment_length=20", "algo.sgd_minibatch_size=20", "algo.num_sgd_iter=2"),
    *("log.every=200", "eval.every=400", "eval.episodes=2", "checkpoint.every=400", "logger.only=[]"),
    "preprocess.normalize_reward=true",
)
"""20 rounds, which leaves time to disturb them"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE, text=True)


def rank(program: subprocess.Popen[str] | Process, number: int) -> psutil.Process:
    """Return the process of a rank; they are started in order."""
    ranks = [p for p in psutil.Process(program.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    return sorted(ranks, key=lambda p: p.create_time())[number]


def disturb(run: Path, words: tuple[str, ...], do: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    """Start a run, ``do`` something to it once it has a checkpoint, and wait for its end.

    Returns:
        The exit code, and what it printed.
    """
    program = start(*words, f"hydra.run.dir={run}")
    while program.poll() is None and not list(run.glob("checkpoints/step_*[0-9]")):
        time.sleep(0.02)
    do(program)
    _, printed = program.communicate(timeout=120)
    return program.returncode, printed


def require_equal(one: Path, other: Path) -> None:
    compared = compare_runs(one, other)
    assert {"rank0", "rank1"} <= compared.keys()
    assert {part: names for part, (_, names) in compared.items() if names} == {}


def test_a_killed_rank_ends_the_run_which_resumes_exactly(undisturbed: Path, tmp_path: Path):
    run = tmp_path / "run"
    warm_up(PPO)
    program = Process(run, PPO)
    assert program.wait(lambda: bool(list(run.glob("checkpoints/step_*[0-9]"))))
    rank(program, 1).kill()
    while program.code is None:
        time.sleep(0.01)
    said = program.log.read_text().splitlines()[-1]
    assert program.code == 1
    assert said.startswith("rlplug: the process of rank 1 of 2 was ended by SIGKILL; the last good ")
    assert said.endswith(f"continue with: python -m rlplug resume {run}")
    assert main(["resume", str(run)]) == 0
    require_equal(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["run", "rank"])
def test_killed_while_ranks_preempt_each_other(victim: str, tmp_path: Path):
    """No step is lost or doubled: episodes of seven steps are whole, and as many as the run has counted."""
    run, data = tmp_path / "run", tmp_path / "data"
    words = (
        *("algo=ddppo", "env=gymnasium", "env.id=tests.contract.tenants.asynchronous:Jittery-v0", "num_envs=4"),
        *("env.vectorization=list", "tuned=none", "hardware=2cpu", "model.hidden=[8]", "rollout_fragment_length=64"),
        *("algo.sgd_minibatch_size=64", "algo.num_sgd_iter=2", "total_steps=6000", "checkpoint.every=500"),
        *("log.every=100", "eval.every=0", "eval.episodes=1", "logger.only=[]", f"record.path={data}"),
    )
    code, _ = disturb(run, words, lambda program: program.kill() if victim == "run" else rank(program, 1).kill())
    assert code == (-signal.SIGKILL if victim == "run" else 1)
    time.sleep(1.0)  # ranks of a run that is killed end by themselves
    subprocess.run([sys.executable, "-m", "rlplug", "resume", run], check=True, capture_output=True)
    recording = Recording([str(data)], Reading())
    for number in range(len(recording.lengths)):
        assert recording.episode(number, None, 1)["obs"].tolist() == [[n] for n in range(8)]
    counted = json.loads((run / "summary.json").read_text())["env_steps"]
    assert counted - 4 * 7 < recording.steps() <= counted <= 6000
    with (run / "metrics.csv").open() as file:
        assert any(float(row["time/preempted"] or 0) for row in csv.DictReader(file))


@pytest.mark.slow
def test_it_restarts_by_itself(undisturbed: Path, tmp_path: Path):
    run = tmp_path / "run"
    code, printed = disturb(run, (*PPO, "hardware.max_restarts=1"), lambda program: rank(program, 0).kill())
    assert code == 0
    assert "the process of rank 0 of 2 was ended by SIGKILL" in printed
    assert "continuing from step" in printed
    changed = json.loads((run / "manifest.json").read_text())["resumed"]
    assert len(changed) == 1
    require_equal(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_resumes_exactly(undisturbed: Path, tmp_path: Path, number: signal.Signals):
    run = tmp_path / "run"
    code, printed = disturb(run, PPO, lambda program: program.send_signal(number))
    assert code == 128 + number
    assert printed.count("stopping after this round") == 1
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    subprocess.run([sys.executable, "-m", "rlplug", "resume", run], check=True, capture_output=True)
    require_equal(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_its_ranks_start(tmp_path: Path, number: signal.Signals):
    """All processes get the signal, as from a terminal or a batch system."""
    words = [sys.executable, "-m", "rlplug", *PPO, f"hydra.run.dir={tmp_path / 'run'}"]
    program = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not psutil.Process(program.pid).children(recursive=True):
        time.sleep(0.005)
    os.killpg(program.pid, number)
    _, printed = program.communicate(timeout=120)
    assert program.returncode in (128 + number, -number)  # -number: before the handler is there
    assert printed == ""


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_killed(tmp_path: Path):
    children: list[psutil.Process] = []

    def kill(program: subprocess.Popen[str]) -> None:
        children.extend(psutil.Process(program.pid).children(recursive=True))
        program.kill()

    code, _ = disturb(tmp_path / "run", PPO, kill)
    assert code == -signal.SIGKILL
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@pytest.mark.slow
def test_a_sweep(tmp_path: Path):
    words = ("-m", *PPO, "seed=1,2", "total_steps=400", f"hydra.sweep.dir={tmp_path}")
    subprocess.run([sys.executable, "-m", "rlplug", *words], check=True, capture_output=True)
    runs = sorted(path.parent for path in tmp_path.glob("*/summary.json"))
    assert [run.name for run in runs] == ["seed=1", "seed=2"]
    scores = [json.loads((run / "summary.json").read_text())["eval/return_mean"] for run in runs]
    assert scores[0] != scores[1]


MISTAKES = {
    "hardware=2cpu hardware.devices=4096": "hardware.devices: 4096 ranks are more than the ",
    "hardware=2cpu train_batch_size=33": "train_batch_size: 33 cannot be shared equally among 2 ",
    "hardware=cpu hardware.microbatches=7": "train_batch_size: 128 cannot be shared equally among 7 ",
    "hardware=cpu hardware.num_nodes=2": "hardware.num_nodes: 2 machines: start rlplug by torchrun or srun on each",
    "hardware=4gpu": "hardware: needs a CUDA device, but none was found; use hardware=cpu",
    "hardware=cpu hardware.max_restarts=-1": "hardware.max_restarts: -1 is out of range",
    "hardware=ray hardware.devices=2 hardware.ray.num_gpus=0.5": "hardware.ray.num_gpus: 0.5 lets ranks share CUDA ",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_refused_before_anything_starts(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["algo=sac", *words.split(), f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"rlplug: {MISTAKES[words]}")
    assert printed.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_rollout_need_not_divide_by_ranks_and_microbatches(tmp_path: Path):
    with closing(build(compose((*PPO, "hardware.microbatches=7")), tmp_path)) as trainer:
        assert trainer.ctx.batch_size % 14


STARTED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "RANK": "0"} | {
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
TORCHRUN = "torchrun started 3 processes, but the run has"
STARTED_ELSEWHERE = {
    "one rank": (
        STARTED,
        ["hardware=cpu"],
        f"hardware: {TORCHRUN} 1 ranks: hardware.devices=1 on each of hardware.num_nodes=1",
    ),
    "two ranks": (STARTED, ["hardware=2cpu"], f"hardware: {TORCHRUN} 2 ranks: hardware.devices=2 on each of"),
    "srun": (STEP, ["hardware=cpu"], "hardware: srun started 3 processes, but the run has 1 ranks: "),
    "restarts": (
        STARTED,
        ["hardware=cpu", "hardware.num_nodes=3", "hardware.max_restarts=1"],
        "hardware.max_restarts: works only for processes that rlplug starts; torchrun started these: set it to 0",
    ),
}


@pytest.mark.parametrize("case", STARTED_ELSEWHERE)
def test_torchrun_and_srun_have_to_start_one_process_per_rank(case, monkeypatch, tmp_path, capsys):
    """They would train separately, or wait for ranks that do not exist."""
    there, words, message = STARTED_ELSEWHERE[case]
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    assert main(["algo=sac", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err.startswith(f"rlplug: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shell", [{"SLURM_JOB_NAME": "interactive"}, {"SLURM_PTY_PORT": "40001"}])
def test_a_shell_in_a_job_of_several_tasks_starts_its_own_ranks(shell, monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert launched_elsewhere()
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    assert not launched_elsewhere()


def test_one_process_evaluates_what_two_ranks_trained(undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(undisturbed)]) == 0
    assert "\nepisodes    2 (seed 0)\n" in capsys.readouterr().out


def test_another_number_of_ranks_is_refused(undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["resume", str(undisturbed), "total_steps=3200", "schedules=stretch", "hardware=cpu"]) == 2
    assert "was written by 2 ranks, and needs as many again: hardware.devices=2" in capsys.readouterr().err

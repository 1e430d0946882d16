"""A run goes on when nobody reads its output any more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=4", "model.hidden=[8]", "total_steps=1600"),
    *("rollout_fragment_length=20", "algo.sgd_minibatch_size=20", "algo.num_sgd_iter=2"),
    *("log.every=200", "eval.every=400", "eval.episodes=2", "checkpoint.every=400"),
    *("logger.only=[progress,csv]", "logger.progress.every=0.1"),
)


@pytest.mark.parametrize("hardware", ["cpu", pytest.param("2cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lines", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_outlives_its_reader(tmp_path: Path, hardware: str, lines: int):
    """``2>&1 | head -n 1``, and a reader that is gone before the first line."""
    run = tmp_path / "run"
    words = [sys.executable, "-m", "rlplug", *RUN, f"hardware={hardware}", f"hydra.run.dir={run}"]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert program.stdout is not None
    for _ in range(lines):
        assert program.stdout.readline() != ""
    program.stdout.close()
    assert program.wait() == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["env_steps"]) == ("finished", 1600)
    assert (run / "checkpoints" / summary["checkpoint"]).name == "step_000000001600"
    again = subprocess.Popen([sys.executable, "-m", "rlplug", "evaluate", run], stdout=subprocess.PIPE)
    assert again.stdout is not None
    again.stdout.close()
    assert again.wait() == 0

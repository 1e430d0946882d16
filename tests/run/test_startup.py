"""What a run brings along before it learns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("lightning", "matplotlib", "pandas", "ray", "scipy", "sympy", "torch._dynamo", "torchmetrics", "wandb")
PROGRAM = """
import json, sys
from pathlib import Path
import rlplug
from rlplug.run.launch import resume, train
folder, *words = sys.argv[1:]
train(rlplug.compose(words), Path(folder))
resume(folder, ["total_steps=768"])
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_a_run_of_one_process_imports_nothing_that_it_does_not_use(algo: str, tmp_path: Path):
    """Checkpoints and a resumed run included."""
    words = [f"algo={algo}", "env=cartpole", "tuned=none", "hardware=cpu", "total_steps=512", "eval.episodes=1"]
    words += ["logger.only=csv", "rollout_fragment_length=8"] + (
        ["algo.sgd_minibatch_size=32"] if algo == "ppo" else ["num_steps_sampled_before_learning_starts=256"]
    )
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), str(tmp_path / "run"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_command_line_counts_start_up_from_the_start_of_its_process(tmp_path: Path):
    """Between the two moments that are known here: the process is there, and the run's folder is written."""
    words = [
        "algo=ppo",
        "env=cartpole",
        "tuned=none",
        "hardware=cpu",
        "logger.only=[]",
        "total_steps=512",
        "eval.episodes=1",
    ]
    words += ["rollout_fragment_length=8", "algo.sgd_minibatch_size=32", f"hydra.run.dir={tmp_path / 'run'}"]
    before = time.time()
    process = subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE, text=True)
    there = time.time()
    _, said = process.communicate()
    assert process.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    made = (tmp_path / "run" / "config.yaml").stat().st_mtime
    assert made - there - 0.02 <= summary["startup_s"] <= time.time() - before

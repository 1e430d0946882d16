"""Two machines, both of them this one: torchrun starts a process for each from the command line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PPO = (
    *("algo=ppo", "env=cartpole", "num_envs=4", "hardware=cpu", "hardware.num_nodes=2", "model.hidden=[16]"),
    *("total_steps=1024", "rollout_fragment_length=64", "algo.sgd_minibatch_size=64", "eval.every=0"),
    *("eval.episodes=2", "logger.only=[]"),
)


@pytest.mark.slow
def test_two_machines_train_together(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = tmp_path / "run"
    where = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = [sys.executable, "-m", "torch.distributed.run", *where]
    words = ["-m", "rlplug", *PPO, f"hydra.run.dir={run}"]
    nodes = [subprocess.Popen([*program, f"--node-rank={node}", *words]) for node in range(2)]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    (checkpoint,) = run.glob("checkpoints/step_*")
    assert {"rank0.pt", "rank1.pt"} <= {file.name for file in checkpoint.iterdir()}

"""Makes fixtures of the format: ``python -m tests.checkpointing.make_fixtures``, once when ``FORMAT`` was raised.

A fixture is a real run folder with one checkpoint and without its lock, and beside it what its policy does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

import rlplug
from rlplug.checkpointing.format import FORMAT, checkpoints
from rlplug.run import launch

FIXTURES = Path(__file__).parent / "fixtures"
SHORT = ("model.hidden=[8]", "eval.every=0", "eval.episodes=1", "hardware=cpu", "logger=[]", "checkpoint.keep_last=1")
RUNS = {
    "sac_pendulum": (
        *("algo=sac", "env=pendulum", "total_steps=300", "log.every=100", "checkpoint.every=0", "buffer.capacity=100"),
        *("loop.num_steps_sampled_before_learning_starts=100", "loop.train_batch_size=8"),
    ),
    "ppo_cartpole": (
        *("algo=ppo", "env=cartpole", "total_steps=512", "log.every=128", "checkpoint.every=0", "num_envs=2"),
        *("loop.rollout_fragment_length=64", "algo.sgd_minibatch_size=64", "algo.num_sgd_iter=2"),
    ),
}
OBSERVATIONS = {
    "sac_pendulum": [[1.0, 0.0, 0.0], [-0.6, 0.8, 2.5], [0.0, -1.0, -7.0]],
    "ppo_cartpole": [[0.0, 0.0, 0.0, 0.0], [0.3, 1.0, 0.1, -1.0], [-0.3, -1.0, -0.1, 1.0]],
}


def main() -> None:
    torch.set_num_threads(1)
    target = FIXTURES / f"format_{FORMAT}"
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)  # so that no path of this machine stands in a file
        for name, overrides in RUNS.items():
            run = Path(name)
            launch.train(rlplug.compose([*SHORT, *overrides]), run, ["python", "-m", "rlplug", "train", *overrides])
            (run / "run.lock").unlink()
            (run / "checkpoints" / "best").unlink()
            (checkpoint,) = checkpoints(run)
            agent = rlplug.load(run)
            does = {
                "env_steps": json.loads((checkpoint / "manifest.json").read_text())["env_steps"],
                "obs": OBSERVATIONS[name],
                "action": agent.act(torch.tensor(OBSERVATIONS[name]).numpy()).tolist(),
            }
            (run / "does.json").write_text(json.dumps(does, indent=1) + "\n")
            shutil.copytree(run, target / name)


if __name__ == "__main__":
    main()

"""More data than Ray's object store holds: Ray spills to the disk; if that is full, the run says so and stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

STORE = 80_000_000  # about the least that Ray takes
SMALL = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "model=mlp", "num_envs=2", "algo.num_sgd_iter=1"),
    *("rollout_fragment_length=64", "algo.sgd_minibatch_size=64", "total_steps=128", "logger.only=[]", "eval.every=0"),
    *("hardware.actors.count=2", "hardware.actors.num_cpus=0.5", f"hardware.ray.object_store_memory={STORE}"),
)
WEIGHTS = (*SMALL, "model.hidden=[6000,4000]")  # 96 MB
SEGMENTS = (  # two of 60 MB, and the learner's copy of the last two
    *SMALL,
    *("env.id=tests.actors.test_full:Pictures-v0", "model.hidden=[8]", "rollout_fragment_length=512"),
    *("total_steps=3072", "algo.sgd_minibatch_size=1024"),
)


class Pictures(gymnasium.Env[Any, Any]):
    """Observe the number of the step as a picture of 120 kB, for 50 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (3, 200, 200), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._picture(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._picture(), 1.0, self.t == 50, False, {}

    def _picture(self) -> Any:
        return np.full((3, 200, 200), self.t, np.uint8)


gymnasium.register("Pictures-v0", entry_point=f"{__name__}:Pictures")


def rlplug(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlplug", *words, f"hydra.run.dir={folder}"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("words", [WEIGHTS, SEGMENTS], ids=["weights", "segments"])
def test_spills_to_the_disk(tmp_path: Path, words: tuple[str, ...]):
    done = rlplug(tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("words", [WEIGHTS, SEGMENTS], ids=["weights", "segments"])
def test_store_and_disk_are_full(tmp_path: Path, words: tuple[str, ...]):
    """Ray is told that the disk is full as soon as a thousandth of it is. Then it refuses new objects, or never returns
    those that it has spilled."""
    words = (*words, "hardware.actors.timeout_s=15", "hardware.actors.max_restarts=0")
    done = rlplug(tmp_path / "run", *words, RAY_local_fs_capacity_threshold="0.001")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    full = "Ray's object store is full, and so is the disk behind it (Local disk is full)"
    assert full in last or "its segment did not arrive within 15 s" in last
    assert "hardware.ray.object_store_memory" in last
    assert "Traceback" not in done.stderr
    assert "Unhandled error" not in done.stderr

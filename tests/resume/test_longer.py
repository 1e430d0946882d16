"""A finished run that is given more steps goes on as if it had been meant so from the start."""

from __future__ import annotations

from pathlib import Path

from rlplug.config import compose
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs

SAC = [
    *("algo=sac", "env=pendulum", "model.hidden=[8]", "buffer.capacity=200", "train_batch_size=8"),
    *("num_steps_sampled_before_learning_starts=50", "checkpoint.every=110", "checkpoint.keep_best=0"),
    *("log.every=37", "eval.every=90", "eval.episodes=1", "hardware=cpu", "logger=[]"),
]


def test_a_run_in_three_parts_is_one_run(tmp_path: Path):
    train(compose([*SAC, "total_steps=500"]), tmp_path / "one")
    train(compose([*SAC, "total_steps=200"]), tmp_path / "three")
    for total in (333, 500):
        assert resume(tmp_path / "three", [f"total_steps={total}"], tell=lambda _: None) is not None
    assert differences_of_runs(tmp_path / "one", tmp_path / "three") == []

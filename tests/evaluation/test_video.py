"""Videos of evaluations: real pictures, of the policy that is evaluated, and nothing else changes."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rlplug
from rlplug.config import compose
from rlplug.run import launch
from rlplug.types import ConfigError

SHORT = ("algo=ppo", "env=cartpole", "total_steps=512", "num_envs=2", "rollout_fragment_length=64", "hardware=cpu",
         "algo.sgd_minibatch_size=64", "eval.every=256", "eval.episodes=2", "logger=[]")  # fmt: skip


def test_every_evaluation_is_recorded_and_the_run_stays_the_same(tmp_path: Path):
    scores = [launch.train(compose([*SHORT, f"eval.record={n}"]), tmp_path / f"run{n}", ["rlplug"]) for n in (0, 1)]
    assert scores[0] == scores[1]
    assert not (tmp_path / "run0" / "videos").exists()
    metrics = [list(csv.DictReader((tmp_path / f"run{n}" / "metrics.csv").open())) for n in (0, 1)]
    losses = [[row["train/policy"] for row in rows] for rows in metrics]
    assert losses[0] == losses[1]
    assert any(losses[0])
    videos = sorted((tmp_path / "run1" / "videos").iterdir())
    steps = [int(row["step"]) for row in metrics[1] if row["eval/return_mean"]]
    assert len(steps) == 2
    assert [video.name for video in videos] == [f"step_{step:012d}.gif" for step in steps]
    with Image.open(videos[-1]) as video:
        assert video.n_frames > 8  # a pole takes as long to fall
        assert video.info["duration"] % 20 == 0  # CartPole's 50 pictures a second; equal ones are one
        first = np.asarray(video.convert("RGB"))
        video.seek(video.n_frames - 1)
        assert not np.array_equal(first, np.asarray(video.convert("RGB")))


def test_an_environment_without_pictures_is_refused_before_the_run(tmp_path: Path):
    words = [*SHORT[:2], "env=gymnasium", "env.id=rlplug.testing.worlds:World-v0", "eval.record=1"]
    with pytest.raises(ConfigError, match=r"^eval.record: .*World-v0 shows no pictures of itself; 0 records none"):
        rlplug.train([*words, f"hydra.run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()

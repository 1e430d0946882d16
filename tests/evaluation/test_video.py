"""Videos of evaluations: real pictures, of the policy that is evaluated, and nothing else changes."""

import csv
import json
import os
import signal
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
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
    with pytest.raises(ConfigError, match=r"^eval.record: .*World-v0 shows no pictures of itself; use 0"):
        rlplug.train([*words, f"hydra.run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


class Shown(CartPoleEnv):
    """CartPole that says it renders for humans alone."""

    metadata = {"render_modes": ["human"], "render_fps": 50}  # noqa: RUF012


class Undeclared(CartPoleEnv):
    """CartPole that renders for humans alone, and does not say so."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def render(self):
        raise NotImplementedError


class Asked(CartPoleEnv):
    """CartPole at whose third picture somebody presses Ctrl-C."""

    pictures: ClassVar[int] = 0

    def render(self):
        Asked.pictures += 1
        if Asked.pictures == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().render()


for made in (Shown, Undeclared, Asked):
    gymnasium.register(f"{made.__name__}-v0", made, max_episode_steps=500)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Shown", "Shown-v0 shows no pictures of itself: it renders human, and no rgb_array; use 0"),
        ("Undeclared", "this environment cannot render rgb_array images; use 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array' that is not in the possible")
def test_an_environment_that_renders_for_humans_is_refused(name, says, tmp_path: Path):
    words = [*SHORT[:2], "env=gymnasium", f"env.id={name}-v0", "eval.record=1"]
    with pytest.raises(ConfigError) as error:
        rlplug.train([*words, f"hydra.run.dir={tmp_path / 'run'}"])
    assert str(error.value) == f"eval.record: {says}"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_is_seen_while_a_video_is_recorded(tmp_path: Path):
    words = [*SHORT[:1], "env=gymnasium", "env.id=Asked-v0", *SHORT[2:], "eval.record=500"]
    with pytest.raises(KeyboardInterrupt):
        launch.train(compose(words), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["checkpoint"] == f"step_{summary['env_steps']:012d}"
    assert Asked.pictures == 3
    assert not [*(tmp_path / "run" / "videos").iterdir()]

"""Videos of evaluations: real pictures, of the policy that is evaluated, and nothing else changes."""

import csv
import json
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from imageio_ffmpeg import read_frames as frames

import rlplug
from rlplug.config import compose
from rlplug.plugins.algo.dqn import DQN
from rlplug.run import launch
from rlplug.tracking import write_video
from rlplug.types import ConfigError, RunError

SHORT = ("algo=ppo", "env=cartpole", "total_steps=512", "num_envs=2", "rollout_fragment_length=64", "hardware=cpu",
         "algo.sgd_minibatch_size=64", "eval.every=256", "eval.episodes=2", "logger.only=[]")  # fmt: skip


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
    assert [video.name for video in videos] == [f"step_{step:012d}.mp4" for step in steps]
    video = frames(videos[-1])
    about = next(video)
    assert about["fps"] == 50  # CartPole's
    shown = [np.frombuffer(frame, np.uint8).reshape(400, 600, 3) for frame in video]
    assert len(shown) > 8  # a pole takes as long to fall
    assert [*shown[0][0, 0]] == [255, 255, 255]
    assert not np.array_equal(shown[0], shown[-1])


def test_what_an_algorithm_predicts_is_a_second_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = torch.zeros(4, 3, 32, 48, dtype=torch.uint8).movedim(1, -1)  # as colors that a network decodes
    drawn[:, :, 24:] = 255
    monkeypatch.setattr(DQN, "pictures", lambda self, batch: drawn if batch["obs"].shape[-1] == 4 else None)
    words = ["algo=dqn", "env=cartpole", "tuned=none", "total_steps=64", "num_steps_sampled_before_learning_starts=32"]
    words += ["buffer.capacity=100", "eval.every=0", "eval.episodes=1", "eval.record=1", "hardware=cpu"]
    words += ["logger.only=[]", "compile=off"]
    launch.train(compose(words), tmp_path / "run", ["rlplug"])
    (path,) = (tmp_path / "run" / "videos").glob("*_predicted.mp4")
    assert path.with_stem(path.stem.removesuffix("_predicted")).exists()
    video = frames(path)
    assert next(video)["source_size"] == (48, 32)
    shown = [np.frombuffer(frame, np.uint8).reshape(32, 48, 3) for frame in video]
    assert len(shown) == 4
    assert shown[-1][:, :16].max() < 40
    assert shown[-1][:, 32:].min() > 215


def test_pictures_of_an_odd_size_are_written_one_by_one_and_without_scaling(tmp_path: Path):
    rng, alive = np.random.default_rng(0), list[Any]()
    first = np.kron(rng.integers(0, 255, (5, 7, 3)), np.ones((15, 15, 1))).astype(np.uint8)

    def shown():
        for i in range(60):
            picture = np.roll(first, i, 1)
            alive.append(weakref.ref(picture))
            yield picture
            assert sum(one() is not None for one in alive) < 4  # none is kept

    write_video(tmp_path / "new" / "a.mp4", shown(), 25)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.mp4"]
    video = frames(tmp_path / "new" / "a.mp4")
    assert next(video)["size"] == (106, 76)
    read = [np.frombuffer(frame, np.uint8).reshape(76, 106, 3) for frame in video]
    assert len(read) == 60
    assert np.abs(read[0][:75, :105].astype(float) - first).mean() < 12  # it is compressed


def test_a_video_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "a.partial").symlink_to(tmp_path / "none" / "a.partial")
    with pytest.raises(RunError, match=r"a\.mp4 cannot be written: "):
        write_video(tmp_path / "a.mp4", iter([np.zeros((8, 8, 3), np.uint8)] * 3), 25)
    assert [*tmp_path.iterdir()] == []


def test_without_imageio_ffmpeg_a_run_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"^eval.record: videos need imageio-ffmpeg .*pip install 'rlplug\[video\]'$"):
        rlplug.train([*SHORT, "eval.record=1", f"hydra.run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_an_environment_without_pictures_is_refused_before_the_run(tmp_path: Path):
    words = [*SHORT[:2], "env=gymnasium", "env.id=rlplug.testing.worlds:World-v0", "eval.record=1"]
    with pytest.raises(ConfigError, match=r"^eval.record: .*World-v0 cannot render; use 0"):
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

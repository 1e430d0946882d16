"""``play`` and ``evaluate --record``: what is shown is what the policy plays."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from imageio_ffmpeg import read_frames

import rlplug
from rlplug.cli import main
from rlplug.cli.play import episodes

SHORT = ("algo=ppo", "env=cartpole", "tuned=none", "total_steps=512", "num_envs=2", "rollout_fragment_length=64",
         "algo.sgd_minibatch_size=64", "eval.every=0", "eval.episodes=2", "logger.only=[]", "hardware=cpu")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    rlplug.train([*SHORT, f"hydra.run.dir={folder}"])
    return folder


def length(file: Path) -> int:
    video = read_frames(file)
    next(video)
    return sum(1 for _ in video)


def test_evaluate_records_a_video_of_the_episodes_that_it_plays(run: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["evaluate", str(run), "--record", "--json", "seed=3", "eval.record=2"]) == 0
    result = json.loads(capsys.readouterr().out)
    video = Path(result["video"])
    assert video.parent == run / "videos"
    images, fps, file = episodes(str(run), ["seed=3", "eval.episodes=2"])
    shown = list(images)
    assert (fps, file) == (50, video)
    assert (shown[0].shape, shown[0].dtype) == ((400, 600, 3), np.uint8)
    assert length(video) == len(shown)
    other = list(episodes(str(run), ["seed=3", "eval.episodes=1"])[0])
    assert 8 < len(other) < len(shown)
    assert all(np.array_equal(a, b) for a, b in zip(other, shown, strict=False))
    new = {path for path in run.rglob("*") if path.stat().st_mtime_ns != before.get(path)}
    assert new == {run / "videos", video}


def test_evaluate_shows_where_the_video_is(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(run), "--record"]) == 0
    assert re.search(rf"^video {{7}}{run}/videos/evaluation_\d{{12}}_s0\.mp4$", capsys.readouterr().out, re.MULTILINE)


def test_the_page_holds_the_video_and_nothing_from_elsewhere(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["play", str(run), "--page", "seed=3"]) == 0
    page = run / "videos" / "play.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    (found,) = re.findall(r'src="([^"]*)"', text)
    assert "http" not in text.replace(found, "")
    (run / "shown.mp4").write_bytes(base64.b64decode(found.removeprefix("data:video/mp4;base64,"), validate=True))
    assert length(run / "shown.mp4") == len(list(episodes(str(run), ["seed=3", "eval.episodes=1"])[0]))


def play(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    own.pop("SDL_VIDEODRIVER", None)
    command = [sys.executable, "-m", "rlplug", "play", *words]
    return subprocess.run(command, env=own | variables, capture_output=True, text=True)


@pytest.mark.parametrize("driver", [None, "dummy", "no-driver"])
def test_without_a_display_it_says_what_shows_the_run(driver: str | None, run: Path):
    done = play(str(run), **({"SDL_VIDEODRIVER": driver} if driver else {}))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlplug: there is no display to open a window on (")
    assert line.endswith(f"--page shows the run in a browser, and `rlplug evaluate {run} --record` writes a video")


def test_a_window_shows_the_episodes_and_closes(run: Path):
    done = play(str(run), "eval.episodes=1", SDL_VIDEODRIVER="offscreen")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "says"),
    {
        "play": "play takes a run folder or a checkpoint first; see rlplug play --help",
        "play --full": "there is no flag --full; see rlplug play --help",
        "play {run} --page algo.gamma=0.9": "algo.gamma: cannot be changed: an evaluation can change ",
        "evaluate {run} --record eval.record=-1": "eval.record: ",
    }.items(),
)
def test_one_line(words: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(words.format(run=run).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlplug: {says}")


def test_an_environment_without_pictures_is_refused_before_it_is_played(tmp_path: Path, capsys):
    words = ["algo=ppo", "env=cartpole_torch", *SHORT[2:], f"hydra.run.dir={tmp_path / 'run'}"]
    rlplug.train(words)
    assert main(["evaluate", str(tmp_path / "run"), "--record"]) == 2
    printed = capsys.readouterr()
    assert "environments on a device cannot render" in printed.err
    assert printed.out == ""

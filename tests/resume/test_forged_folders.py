"""Run folders that somebody else made are refused with one message; nothing is followed, resolved or awaited."""

import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from rlplug.checkpointing.format import Checkpoint, sealed
from rlplug.checkpointing.serialize import write_tree
from rlplug.cli import main

SHORT = ["env=cartpole", "total_steps=1024", "eval.episodes=1", "eval.every=0", "logger=[]", "model.hidden=[8]"]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forged") / "run"
    assert main([*SHORT, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, tmp_path / "run", symlinks=True)

    def too_long(*args):
        raise AssertionError("it waits")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield Path("run")
    signal.alarm(0)


def edit(run: Path, **nodes) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in nodes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def checkpoint(run: Path) -> Path:
    return next((run / "checkpoints").glob("step_*"))


def reseal(run: Path, name: str, change) -> None:
    """Change a file of the checkpoint, and make all checksums fit."""
    folder, content = checkpoint(run), Checkpoint(checkpoint(run)).tree(name)
    change(content)
    (folder / f"{name}.pt").unlink()
    manifest = Checkpoint(folder).manifest
    manifest["files"][f"{name}.pt"] = write_tree(folder / f"{name}.pt", content)
    (folder / "manifest.json").write_bytes(sealed(manifest))


def spoil(tree: dict) -> None:
    """Make every number NaN that may be."""
    for key, part in tree.items():
        if isinstance(part, dict):
            spoil(part)
        elif isinstance(part, torch.Tensor) and part.is_floating_point():
            tree[key] = torch.full_like(part, math.nan)
        elif isinstance(part, int | float) and not isinstance(part, bool):
            tree[key] = math.nan


FORGERIES = {
    "a pipe for the configuration": (lambda run: pipe(run / "config.yaml"), "run/config.yaml"),
    "a pipe for the manifest": (lambda run: pipe(run / "manifest.json"), "Not a regular file"),
    "an alias bomb": (lambda run: (run / "config.yaml").write_text(BOMB), "it has an alias"),
    "no algorithm": (lambda run: edit(run, algo=None), "algo"),
    "no hardware": (lambda run: edit(run, hardware=None), "hardware"),
    "no environments": (lambda run: edit(run, num_envs=None), "num_envs"),
    "a number that is none": (lambda run: edit(run, num_envs=float("nan")), "num_envs"),
    "a list": (lambda run: (run / "config.yaml").write_text("[1, 2]\n"), "it contains no settings"),
    "weights that are NaN": (lambda run: reseal(run, "weights", spoil), "holds NaN"),
    "an optimizer that is NaN": (lambda run: reseal(run, "learner", lambda t: spoil(t["learner"])), "holds NaN"),
    "counters that are NaN": (lambda run: reseal(run, "learner", lambda t: spoil(t["progress"])), "does not fit"),
    "generators that are NaN": (lambda run: reseal(run, "rank0", spoil), "does not fit"),
    "a pipe for the weights": (lambda run: pipe(checkpoint(run) / "weights.pt"), "it has 0 bytes"),
    "a word for a node": (lambda run: edit(run, hardware="cpu"), "hardware"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_one_message(forgery: str, run: Path, capsys):
    forge, said = FORGERIES[forgery]
    forge(run)
    assert main(["resume", "run", "total_steps=2048", "schedules=stretch"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("rlplug: ") for line in lines)
    assert said in lines[0]


def test_weights_that_are_nan_are_not_played(run: Path, capsys):
    reseal(run, "weights", spoil)
    assert main(["evaluate", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "holds NaN" in line


def test_a_pipe_for_the_metrics_is_replaced(run: Path, capsys):
    pipe(run / "metrics.csv")
    assert main(["resume", "run", "total_steps=2048", "schedules=stretch", "logger=csv"]) == 0
    assert (run / "metrics.csv").is_file()


def test_a_lock_that_leads_elsewhere_is_not_followed(run: Path, tmp_path: Path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    (run / "run.lock").unlink(missing_ok=True)
    (run / "run.lock").symlink_to(mine)
    assert main(["resume", "run", "total_steps=2048", "schedules=stretch"]) == 2
    assert mine.read_text() == "precious"
    (line,) = capsys.readouterr().err.splitlines()
    assert "run cannot be written" in line


def test_settings_are_not_resolved_again(run: Path, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "xyzzy")
    config = yaml.safe_load((run / "config.yaml").read_text())
    edit(run, env=config["env"] | {"id": "${oc.env:SECRET}"})
    assert main(["resume", "run", "total_steps=2048", "schedules=stretch"]) == 2
    said = capsys.readouterr().err
    assert "xyzzy" not in said
    assert "${oc.env:SECRET}" in said


def test_any_path_is_taken(run: Path, capsys):
    place = Path("algo.lr=0.1,seed=1") / "run"
    place.parent.mkdir()
    run.rename(place)
    assert main(["evaluate", str(place), "eval.episodes=1"]) == 0
    assert main(["resume", str(place), "total_steps=2048", "schedules=stretch"]) == 0
    assert "continuing from step" in capsys.readouterr().err

"""A fork equals its run up to the checkpoint, and differs afterwards by its settings only."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug import tree
from rlplug.checkpointing.format import Checkpoint, checkpoints
from rlplug.cli import main
from rlplug.run import launch
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError

STEPS = 600
SMALL = ("hardware=cpu", "logger.only=csv", "model.hidden=[8]", "eval.episodes=2", "log.every=100", "num_envs=1")
SMALL = (*SMALL, f"total_steps={STEPS}", "checkpoint.every=100", "checkpoint.keep_last=10", "tuned=none")
RUNS = {
    "sac": (
        *("algo=sac", "env=pendulum", "num_steps_sampled_before_learning_starts=50", "train_batch_size=16"),
        *("buffer.capacity=300", "env.max_episode_steps=90", *SMALL),
    ),
    "ppo": (
        *("algo=ppo", "env=cartpole", "rollout_fragment_length=100", "algo.sgd_minibatch_size=50"),
        *("algo.num_sgd_iter=2", "algo.clip_param=0.01", *SMALL),
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    assert main([*RUNS[request.param], f"hydra.run.dir={folder}"]) == 0
    return folder


def step(run: Path, number: int) -> int:
    """Return the step of a run's ``number``-th checkpoint."""
    return Checkpoint(checkpoints(run)[::-1][number]).steps


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def test_without_a_change_it_ends_as_the_run(run: Path, tmp_path: Path):
    assert main(["fork", f"{run}@{step(run, 0)}", "--to", str(tmp_path / "fork")]) == 0
    assert differences_of_runs(run, tmp_path / "fork") == []


def test_the_prefix_is_the_same_and_the_rest_is_not(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fork, at = tmp_path / "fork", step(run, 0)
    assert main(["fork", f"{run}@{at}", "--to", str(fork), "algo.gamma=0.5"]) == 0
    before = [row for row in rows(run) if int(row["step"]) <= at]
    assert before
    assert [row for row in rows(fork) if int(row["step"]) <= at] == before
    ends = [Checkpoint(checkpoints(folder)[0]).tree("weights") for folder in (run, fork)]
    assert not torch.equal(*(next(iter(_tensors(end["algorithm"]))) for end in ends))
    manifest, own = (json.loads((folder / "manifest.json").read_text()) for folder in (fork, run))
    assert manifest["run"] != own["run"]
    assert manifest["forked"]["identity"] == own["run"]
    assert manifest["forked"]["step"] == at
    assert manifest["forked"]["changed"].keys() == {"algo.gamma"}
    assert manifest["forked"]["changed"]["algo.gamma"]["to"] == 0.5
    assert "no effect" not in capsys.readouterr().err


def _tensors(tree):
    return (leaf for leaf in tree.values() if leaf.ndim == 2)


def test_an_optimizer_has_the_options_of_the_fork(tmp_path: Path):
    """A checkpoint holds the options that its optimizer had; they are not those of a fork."""
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert main(["algo=ddpg", *RUNS["sac"][1:], f"hydra.run.dir={run}"]) == 0
    assert main(["fork", f"{run}@{step(run, 0)}", "--to", str(fork), "algo.l2_reg=0.25"]) == 0
    learner = Checkpoint(checkpoints(fork)[0]).tree("learner")
    found = [
        group["weight_decay"] for path, leaf in tree.items(learner) if path[-1] == "param_groups" for group in leaf
    ]
    assert set(found) == {0.25}


def test_a_setting_without_effect_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fork", f"{run}@{step(run, 0)}", "--to", str(tmp_path / "fork"), "eval.episodes=3"]) == 0
    assert "eval.episodes=3 had no effect" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_a_fork_is_forked_and_resumed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["fork", f"{run}@{step(run, 0)}", "--to", str(first)]) == 0
    assert main(["fork", f"{first}@{step(first, -1)}", "--to", str(second), "total_steps=800"]) == 0
    assert "had no effect" not in capsys.readouterr().err
    assert main(["resume", str(first), "total_steps=800"]) == 0
    assert [name for name in differences_of_runs(first, second) if not name.startswith("best")] == []


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_a_fork_that_has_begun_is_kept_when_it_fails(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    resume = launch.resume

    def fails(*args: Any, **options: Any) -> None:
        resume(*args, **options)
        raise ConfigError("env", "fails late")

    monkeypatch.setattr(launch, "resume", fails)
    assert main(["fork", f"{run}@{step(run, 0)}", "--to", str(tmp_path / "fork")]) == 2
    assert (tmp_path / "fork" / "summary.json").exists()


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_the_name_of_a_fork(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fork", f"{run}@{step(run, 0)}", "algo.gamma=0.9"]) == 0
    assert f"forked {run} to {run}@{step(run, 0)},algo.gamma=0.9" in capsys.readouterr().err
    assert (run.parent / f"run@{step(run, 0)},algo.gamma=0.9" / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "fork takes a run folder"),
        (["--to"], "--to: is given without a value"),
        (["{run}@nope"], "'nope' is no step"),
        (["{run}@123"], "has no checkpoint of step 123; it has [0-9]+, "),
        (["{run}@{step}", "env.max_episode_steps=50"], "env.max_episode_steps: cannot change"),
        (["{run}@{step}", "seed=2"], "seed: cannot change: a fork continues with the random numbers"),
        (["{run}@{step}", "algo=a2c"], "algo: cannot be set here"),
        (["{run}@{step}", "model.hidden=[9]"], "model.hidden: cannot change"),
        (["{run}@{step}", "num_envs=2"], "num_envs: cannot change"),
        (["{run}@{step}", "optimizer=sgd"], "optimizer: cannot change: a fork continues from the state"),
        (["{run}@{step}", "algo.gama=0.9"], "algo.gama"),
        (["{run}@{step}", "algo.gamma=2"], "algo.gamma"),
        (["{run}@{last}", "algo.gamma=0.9"], "total_steps: 600 leaves nothing to train after the [0-9]+ steps of"),
        (["{run}@{step}", "--to", "{run}"], "exists; choose another folder"),
        (["{run}/nothing@300"], "does not exist"),
    ],
)
@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_bad_input(run: Path, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    assert main(["fork", *(word.format(run=copy, step=step(run, 0), last=step(run, -1)) for word in words)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [copy]

"""``stop``: a run that ends early because a metric reached its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplug import compose
from rlplug.cli import fork
from rlplug.run import launch
from rlplug.types import ConfigError, RunError

SHORT = ["algo=ppo", "env=pendulum", "hardware=cpu", "compile=off", "logger.only=[]", "eval.episodes=1"]
SHORT += [
    "num_envs=2",
    "rollout_fragment_length=16",
    "tuned=none",
    "algo.sgd_minibatch_size=16",
    "log.every=64",
    "checkpoint.every=64",
    "checkpoint.keep_last=99",
]


def run(folder: Path, *words: str) -> dict[str, object]:
    launch.train(compose([*SHORT, *words]), folder, tell=lambda line: None)
    return read(folder)


def read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def weights(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step_{step:012d}/weights.pt").read_bytes()


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ("env_steps: 100", 128),
        ("updates: 3", 96),
        ("eval/return_mean: -1e9", 64),
        ("train/policy: '<1e9'", 64),
        ("time/wall_s: 0, eval/return_mean: 1e9", 64),
    ],
)
def test_a_run_ends_after_the_round_in_which_a_limit_is_reached(tmp_path, limit, steps):
    summary = run(tmp_path / "run", f"stop={{{limit}}}", "total_steps=640", "eval.every=64")
    assert summary["status"] == "finished"
    assert summary["env_steps"] == steps
    assert str(summary["stopped"]).startswith(limit.partition(":")[0])


def test_a_stopped_run_goes_on_only_with_another_limit_and_then_as_if_it_had_not_stopped(tmp_path):
    whole, stopped, said = tmp_path / "whole", tmp_path / "stopped", list[str]()
    assert "stopped" not in run(whole, "total_steps=256")
    run(stopped, "total_steps=256", "stop={env_steps: 100}")
    assert launch.resume(stopped, tell=said.append) is None
    assert "env_steps reached 128" in said[-1]
    launch.resume(stopped, ["stop={env_steps: 180}"], tell=said.append)
    assert read(stopped)["env_steps"] == 192
    launch.resume(stopped, ["stop=null"], tell=said.append)
    assert "stopped" not in read(stopped)
    assert weights(stopped, 256) == weights(whole, 256)


def test_a_fork_of_a_stopped_run_takes_its_own_limit(tmp_path):
    run(tmp_path / "a", "total_steps=256", "stop={env_steps: 64}")
    assert fork.main([str(tmp_path / "a"), "--to", str(tmp_path / "b"), "algo.lr=1e-4", "stop={env_steps: 128}"]) == 0
    assert read(tmp_path / "b")["env_steps"] == 128


@pytest.mark.parametrize(
    ("limit", "key", "said"),
    [
        ("return: 3", "stop.return", "is no metric: should be env_steps, agent_steps, "),
        (
            "eval/return_mean: '~3'",
            "stop.eval/return_mean",
            "'~3' is no limit: should be a number to reach, or '<0.1'",
        ),
        ("train/loss: '<x'", "stop.train/loss", "'<x' is no limit"),
    ],
)
def test_a_wrong_limit_is_refused_before_the_run_starts(tmp_path, limit, key, said):
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "run", f"stop={{{limit}}}")
    assert error.value.key == key
    assert said in error.value.message
    assert not (tmp_path / "run").exists()


def test_a_limit_of_agent_steps_needs_agents(tmp_path):
    with pytest.raises(RunError, match=r"stop\.agent_steps: there is no such metric"):
        run(tmp_path / "a", "stop={agent_steps: 100}", "total_steps=2048")


def test_a_limit_of_a_metric_that_does_not_exist_is_reported(tmp_path, capsys):
    with pytest.raises(
        RunError, match=r"stop\.eval/return_men: there is no such metric; did you mean eval/return_mean"
    ):
        run(tmp_path / "a", "stop={eval/return_men: 3}", "total_steps=128", "eval.every=64")
    with pytest.warns(UserWarning, match=r"stop\.train/polic: train/polic was never logged; did you mean train/policy"):
        run(tmp_path / "b", "stop={train/polic: 3}", "total_steps=128")


@pytest.mark.parametrize(("level", "notes"), [("info", 1), ("warning", 0)])
def test_notes_at_the_start_depend_on_the_level(tmp_path, level, notes):
    told = list[str]()
    words = ["stop={time/wall_s: 9999}", "total_steps=64", f"log.level={level}"]
    launch.train(compose([*SHORT, *words]), tmp_path / "run", tell=told.append)
    assert told.count("stops early at time/wall_s >= 9999") == notes

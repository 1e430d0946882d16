"""``--json``: one document on stdout, also when a command line is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplug.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert code == 0 or "rlplug:" not in err
    return json.loads(out)


def test_plugins(capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, "plugins", "--json")
    assert {"kind": "algo", "name": "sac", "distribution": "rlplug", "version": "0.1.0"} in found["components"]
    assert {"kind": "env", "name": "pong", "distribution": "rlplug", "version": "0.1.0"} in found["presets"]
    assert {one["kind"] for one in printed(capsys, "plugins", "model", "--json")["components"]} == {"model"}


def test_options(capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, "plugins", "algo", "ppo", "--json")
    assert found["class"] == "rlplug.plugins.algo.ppo:PPO"
    (gamma,) = [option for option in found["options"] if option["name"] == "gamma"]
    assert gamma == {
        "name": "gamma",
        "type": "float",
        "default": "0.99",
        "range": ">= 0, <= 1",
        "doc": "Discount factor.",
    }
    tuned = printed(capsys, "plugins", "tuned", "ppo_cartpole", "--json")
    assert tuned["settings"]["algo.gamma"] == 0.98
    assert printed(capsys, "plugins", "experiment", "ppo_doorkey", "--json")["choices"]["algo"] == "ppo"


def test_check(capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, "check", "algo=ppo", "env=cartpole", "total_steps=10_000", "num_envs=8", "--json")
    assert found["env"]["name"] == "CartPole-v1"
    assert found["env"]["spaces"]["agent"]["action"] == "Discrete(2)"
    assert found["loop"] == {"name": "alternate", "env_steps": 9984, "updates": 39}
    assert found["algo"]["parameters"] > 1_000
    assert found["config"]["algo"]["name"] == "ppo"
    assert "tuned for ppo on cartpole" in found["note"]


def test_check_foresees_no_updates_of_whole_episodes(capsys: pytest.CaptureFixture[str]):
    words = ("check", "algo=ppo", "env=cartpole", "loop=episodes", "total_steps=10_000", "num_envs=8")
    assert printed(capsys, *words, "--json")["loop"] == {"name": "episodes", "env_steps": 9984, "updates": None}
    assert main([*words]) == 0
    assert "total_steps=10,000, in whole episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "key", "suggestion"),
    [
        (["check", "algo.gama=0.9"], "algo.gama", "algo.gamma"),
        (["check", "algo=sacc"], "algo", "sac"),
        (["check", "algo.gamma=2"], "algo.gamma", "should be less than or equal to 1"),
        (["check", "algo=a3c", "buffer=replay"], "buffer", "use buffer=queue"),
        (["plugins", "algo", "saac"], "algo.name", "sac"),
        (["plugin"], "", "plugins"),
    ],
)
def test_refusals(arguments: list[str], key: str, suggestion: str, capsys: pytest.CaptureFixture[str]):
    (error,) = printed(capsys, *arguments, "--json", code=2).values()
    assert (error["key"], error["suggestion"]) == (key, suggestion)
    assert suggestion in error["reason"]


def test_several_refusals(capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, "check", "algo.gamma=2", "num_envs=0", "--json", code=2)
    assert {error["key"] for error in found["errors"]} == {"algo.gamma", "num_envs"}
    assert found["error"] == found["errors"][0]


RUN = ("algo=a2c", "env=cartpole", "tuned=none", "hardware=cpu", "total_steps=64", "num_envs=2", "eval.episodes=1")


def test_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = printed(capsys, *RUN, "logger=[csv]", "hydra.run.dir=runs/a", "--json")
    assert found["folder"] == str(tmp_path / "runs/a")
    assert {"folder": found["folder"], **json.loads(Path("runs/a/summary.json").read_text())} == found
    for verb in ("resume", "watch"):
        assert printed(capsys, verb, "a", "--json") == found | {"folder": "runs/a"}
    assert printed(capsys, "evaluate", "a/checkpoints/best", "--json")["checkpoint"] == "runs/a/checkpoints/best"
    assert printed(capsys, "push", "a", "--json")["to"] == "runs/a/card"
    assert printed(capsys, "play", "a", "--page", "--json") == {"page": "runs/a/videos/play.html"}
    assert "add --page" in printed(capsys, "play", "a", "--json", code=2)["error"]["reason"]
    fork = printed(capsys, "fork", "a", "total_steps=128", "--to=runs/b", "--json")
    assert (fork["folder"], fork["env_steps"] > 64) == ("runs/b", True)
    assert printed(capsys, "plot", "runs", "--metric=episode/return", "--json")["files"] == ["curves.png", "curves.svg"]
    assert printed(capsys, "report", "runs/a", "--json") == {"files": ["report.html"]}
    error = printed(capsys, *RUN, "hydra.run.dir=runs/a", "--json", code=2)["error"]
    assert (error["key"], error["suggestion"]) == ("hydra.run.dir", "choose another folder, or resume it")
    assert printed(capsys, "--cfg=job", "--json", code=2)["error"]["reason"].startswith("--json prints the result of")


def test_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = ("-m", *RUN, "algo.gamma=0.9,2", "logger.only=[]", "hydra.sweep.dir=runs/s", "--json")
    assert printed(capsys, *words, code=2)["error"]["key"] == "algo.gamma"
    found = printed(capsys, *(word.replace(",2", "") for word in words))
    assert found["folder"] == "runs/s"
    ((score, status),) = ((job["score"], job["status"]) for job in found["jobs"])
    assert status == "finished"
    assert score > 0


def test_a_new_package(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = printed(capsys, "new", "algo", "mine", "--json")
    assert all((tmp_path / found["folder"] / file).is_file() for file in found["files"])


def test_a_refusal_without_a_suggestion(capsys: pytest.CaptureFixture[str]):
    error = printed(capsys, "evaluate", "nowhere", "--json", code=2)["error"]
    assert error == {"key": "", "reason": "nowhere does not exist", "suggestion": None}

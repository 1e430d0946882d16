"""``--json``: one document on stdout, also when a command line is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlplug.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert "rlplug:" not in err
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


def test_a_refusal_without_a_suggestion(capsys: pytest.CaptureFixture[str]):
    error = printed(capsys, "evaluate", "nowhere", "--json", code=2)["error"]
    assert error == {"key": "", "reason": "nowhere does not exist", "suggestion": None}

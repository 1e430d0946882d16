"""Editors check the configuration files as a run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from rlplug import registry
from rlplug.cli import main
from rlplug.cli.schema import schemas

ROOT = Path(__file__).parents[2]
FILES = [path for folder in (ROOT / "conf", *(ROOT / "plugins").glob("*/*/conf")) for path in folder.rglob("*.yaml")]


@pytest.fixture(scope="module")
def found() -> dict[str, Draft7Validator]:
    every = schemas()
    for schema in every.values():
        Draft7Validator.check_schema(schema)
    return {group: Draft7Validator(schema) for group, schema in every.items()}


def wrong(validator: Draft7Validator, content: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:100]}" for error in validator.iter_errors(content)]


def test_every_file_fits_its_schema(found: dict[str, Draft7Validator]):
    assert len(FILES) > 150
    for path in FILES:
        group = "config" if path.name == "config.yaml" else path.parent.name
        assert wrong(found[group], OmegaConf.to_container(OmegaConf.load(path))) == [], path


@pytest.mark.parametrize(
    ("group", "content"),
    [
        ("algo", {"algo": {"name": "ppo", "gama": 0.9}}),
        ("algo", {"algo": {"name": "ppo", "gamma": 1.5}}),
        ("env", {"env": {"name": "connect_four", "rows": 6}}),
        ("env", {"name": "connect_four", "rows": 6}),
        ("algo", {"algo": {"name": "ppo", "lr": [[0, 1e-3], ["x", 0.0]]}}),
        ("algo", {"algo": {"name": "poo"}}),
        ("algo", {"total_step": 3}),
        ("tuned", {"eval": {"every": -1}}),
        ("tuned", {"algo": {"no_such_option": 1}}),
        ("tuned", {"critic_model": {"name": "mlp", "hidden": ["wide"]}}),
        ("experiment", {"exploration": {"icm": {"name": "icm", "eta": "much"}}}),
        ("env", {"name": "gymnasium", "id": 3}),
        ("env", {"frame_stack": 0}),
        ("model", {"name": "lstm", "torso": {"name": "mlp", "hidde": [8]}}),
        ("buffer", {"name": "replay", "capacity": "10"}),
        ("logger", {"name": "wandb", "mode": "sometimes"}),
        ("config", {"checkpoint": {"keep_last": 0}}),
    ],
)
def test_mistakes_are_marked(group: str, content: Any, found: dict[str, Draft7Validator]):
    assert wrong(found[group], content)


def test_values_may_come_later(found: dict[str, Draft7Validator]):
    schedule = [[0, 1e-3], ["${total_steps}", 0.0]]
    assert wrong(found["tuned"], {"algo": {"lr": schedule}, "num_envs": "${oc.env:ENVS}"}) == []
    assert wrong(found["env"], {"name": "gymnasium", "id": "???"}) == []


def test_options_have_their_doc_lines(found: dict[str, Draft7Validator]):
    text = json.dumps(found["algo"].schema)
    for name, field in registry.load("algo", "sac").Config.__pydantic_fields__.items():
        assert json.dumps(field.description) in text, name


def test_the_command_writes_them_for_vs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["schema"]) == 0
    uses = json.loads(capsys.readouterr().out)
    assert uses == json.loads((ROOT / ".vscode" / "settings.json").read_text())
    for path, pattern in uses["yaml.schemas"].items():
        assert json.loads((tmp_path / path).read_text())["$schema"].endswith("draft-07/schema#")
        assert [file for file in ROOT.glob(pattern.removeprefix("**/")) if file.suffix == ".yaml"], pattern


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert main(["schema", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err
    assert main(["schema", "--fast"]) == 2
    assert main(["schema", "a", "b"]) == 2

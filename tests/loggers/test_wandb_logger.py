"""Runs of W&B's own client, offline; what it wrote is read back from its transaction log."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rlplug.types import ConfigError

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def records(file: Path) -> Iterator[Record]:
    """Records of a ``.wandb`` file: LevelDB's log format, in which a record may be cut into fragments."""
    data, at, whole = file.read_bytes(), FILE_HEADER, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield Record.FromString(whole)
            whole = b""


def read(folder: Path) -> list[Record]:
    wandb.teardown()  # waits for the process that writes: `finish` may return before it has
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return list(records(file))


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def play(run, logger, status: str = "finished", **options: Any) -> list[Record]:
    run.start(logger("wandb", **options))
    run.log(100, {"train/critic": 0.5})
    run.log(200, {"train/critic": 0.25, "episode/return": -1200.0})
    run.evaluate(-300.25, 40.0)
    run.end(status, **{"eval/return_mean": -300.25})
    return read(run.run_dir)


def test_an_offline_run_holds_the_configuration_and_metrics_at_their_steps(run, logger):
    log = play(run, logger, project="pendulum", group="sweep", tags=["a", "b"])
    assert [record.exit.exit_code for record in log if record.HasField("exit")] == [0]

    (about,) = [record.run for record in log if record.HasField("run")]
    config = items(about.config.update)
    assert {key: config[key] for key in run.config.raw} == run.config.raw
    assert (about.project, about.run_group, list(about.tags)) == ("pendulum", "sweep", ["a", "b"])
    assert about.display_name == "sac-pendulum/2030-01-02_03-04-05-s3"

    history = [items(record.history.item) for record in log if record.HasField("history")]
    metrics = [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]
    assert metrics == [
        {"env_steps": 100, "train/critic": 0.5},
        {"env_steps": 200, "train/critic": 0.25, "episode/return": -1200.0},
        {"env_steps": 200, "eval/return_mean": -300.25, "eval/return_std": 40.0},
    ]
    axes = {record.metric.glob_name: record.metric.step_metric for record in log if record.HasField("metric")}
    assert axes["*"] == "env_steps"

    summary: dict[str, Any] = {}
    for record in log:
        summary |= items(record.summary.update)
    assert summary["status"] == "finished"
    assert summary["eval/return_mean"] == -300.25


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 255)])
def test_the_exit_code_says_how_the_run_ended(run, logger, status, code):
    assert [record.exit.exit_code for record in play(run, logger, status) if record.HasField("exit")] == [code]


def test_a_continued_run_has_the_same_id(run, logger):
    (first,) = [record.run.run_id for record in play(run, logger) if record.HasField("run")]
    time.sleep(1)  # W&B names its folders by id and second
    again = type(run)(run.run_dir)
    again.start(logger("wandb"))
    again.end()
    files = list(run.run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert [file.stem for file in files] == [f"run-{first}"] * 2


def test_disabled_writes_nothing(run, logger):
    run.start(logger("wandb", mode="disabled"))
    run.log(100, {"train/critic": 0.5})
    run.end()
    assert list(run.run_dir.iterdir()) == []


def test_online_without_credentials_is_refused_before_the_run_and_never_asks(logger):
    with pytest.raises(ConfigError) as error:
        logger("wandb", mode="online")
    assert error.value.key == "logger.wandb.mode"
    assert "WANDB_API_KEY" in error.value.message
    assert "mode=offline" in error.value.message

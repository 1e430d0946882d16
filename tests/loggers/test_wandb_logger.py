"""Runs of W&B's own client, offline; what it wrote is read back from its transaction log."""

from __future__ import annotations

import contextlib
import json
import shutil
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
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name)
    return [record for file in files for record in records(file)]


def history(log: list[Record]) -> list[dict[str, Any]]:
    """Return the rows that were logged, without W&B's own values."""
    rows = [items(record.history.item) for record in log if record.HasField("history")]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


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
    log = play(run, logger, project="pendulum", group="sweep", job_type="search", tags=["a", "b"], notes="why")

    (about,) = [record.run for record in log if record.HasField("run")]
    config = items(about.config.update)
    assert {key: config[key] for key in run.config.raw} == run.config.raw
    assert (about.project, about.run_group, list(about.tags)) == ("pendulum", "sweep", ["a", "b"])
    assert (about.job_type, about.notes, about.git.commit) == ("search", "why", "c" * 40)
    assert about.display_name == "sac-pendulum/2030-01-02_03-04-05-s3"

    assert history(log) == [
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


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1), ("interrupted", 255)])
def test_the_exit_code_says_how_the_run_ended(run, logger, status, code):
    assert [record.exit.exit_code for record in play(run, logger, status) if record.HasField("exit")] == [code]


def test_a_continued_run_is_the_same_run_with_every_metric_once_per_step(run, logger):
    """The first process is killed: what it had not sent before its checkpoint is sent by the second one."""
    first, table = logger("wandb"), logger("csv")
    run.start(table, first)
    run.log(100, {"train/critic": 0.5})
    run.log(200, {"train/critic": 0.25})
    run.evaluate(-300.25, 40.0)
    run.log(300, {"train/critic": 0.125})
    first._run.finish()
    time.sleep(1)  # W&B names its folders by id and second

    again = type(run)(run.run_dir)
    again.progress.env_steps, again.logged = 200, 3
    again.start(logger("csv"), logger("wandb"))
    again.log(300, {"train/critic": 0.125})
    again.log(400, {"train/critic": 0.1})
    again.end()
    log = read(run.run_dir)
    assert {record.run.run_id for record in log if record.HasField("run")} == {"a" * 32}
    assert len([*run.run_dir.glob("wandb/offline-run-*")]) == 2
    assert history(log) == [
        {"env_steps": 100, "train/critic": 0.5},
        {"env_steps": 200, "train/critic": 0.25},
        {"env_steps": 200, "eval/return_mean": -300.25, "eval/return_std": 40.0},
        {"env_steps": 300, "train/critic": 0.125},
        {"env_steps": 400, "train/critic": 0.1},
    ]


def test_a_log_that_a_kill_cut_off_is_completed(run, logger):
    first, table = logger("wandb"), logger("csv")
    run.start(table, first)
    for step in range(1, 40):
        run.log(step, {"train/critic": float(step)})
    first._run.finish()
    wandb.teardown()
    (file,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    for size in (len(file.read_bytes()) // 2, 7, 3):  # within a record, no records, not even the head
        with file.open("r+b") as log:
            log.truncate(size)
        again = type(run)(run.run_dir)
        again.progress.env_steps, again.logged = 39, 39
        time.sleep(1)
        again.start(logger("csv"), logger("wandb"))
        again.end()
        wandb.teardown()
        files = sorted(run.run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name)
        rows = [row for one in files for row in history(_readable(one))]
        assert [row["env_steps"] for row in rows] == [*range(1, 40)]
        for other in files[1:]:
            shutil.rmtree(other.parent)


def _readable(file: Path) -> list[Record]:
    found: list[Record] = []
    with contextlib.suppress(Exception):  # the cut record
        for record in records(file):
            found.append(record)
    return found


def test_the_video_and_the_best_weights_are_there(evaluated, logger):
    run = evaluated
    run.start(logger("wandb"))
    run.log(200, {"train/critic": 0.25})
    run.evaluate(-300.25, 40.0)
    run.end()
    log = read(run.run_dir)
    (shown,) = [row for row in history(log) if "eval/video/path" in row]
    assert (shown["env_steps"], shown["eval/video/_type"]) == (200, "video-file")
    (copied,) = run.run_dir.glob(f"wandb/offline-run-*/files/{shown['eval/video/path']}")
    assert copied.read_bytes() == (run.run_dir / "videos" / "step_000000000200.mp4").read_bytes()
    (weights,) = [record.artifact for record in log if record.HasField("artifact")]
    assert (weights.name, weights.type, sorted(weights.aliases)) == (f"{'a' * 32}-best", "model", ["best", "latest"])
    assert sorted(entry.path for entry in weights.manifest.contents) == ["manifest.json", "weights.pt"]
    assert json.loads(weights.metadata) == {"checkpoint": "step_000000000200"}

    time.sleep(1)
    again = type(run)(run.run_dir)  # killed before its first checkpoint
    again.start(logger("csv"), logger("wandb", log_model=False))
    again.log(200, {"train/critic": 0.25})
    again.evaluate(-300.25, 40.0)
    again.end()
    rows = history(read(run.run_dir))
    assert [sum(name in row for row in rows) for name in ("train/critic", "eval/video/path")] == [1, 1]


def test_no_weights_on_request(evaluated, logger):
    evaluated.start(logger("wandb", log_model=False))
    evaluated.end()
    assert not [record for record in read(evaluated.run_dir) if record.HasField("artifact")]


def test_disabled_writes_nothing(run, logger):
    run.start(logger("wandb", mode="disabled"))
    run.log(100, {"train/critic": 0.5})
    run.end()
    assert [path.name for path in run.run_dir.iterdir()] == ["manifest.json"]


def test_online_without_credentials_is_refused_before_the_run_and_never_asks(logger):
    with pytest.raises(ConfigError) as error:
        logger("wandb", mode="online")
    assert error.value.key == "logger.wandb.mode"
    assert "WANDB_API_KEY" in error.value.message
    assert "mode=offline" in error.value.message

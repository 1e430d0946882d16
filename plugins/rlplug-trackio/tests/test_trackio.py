"""Runs that are logged to Trackio's local database, which is read back."""

import csv
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trackio
from rlplug import ConfigError, resume, testing, train

from rlplug_trackio.logger import Trackio

RUN = ["algo=ppo", "env=cartpole", "tuned=none", "num_envs=2", "rollout_fragment_length=64", "total_steps=1024"]
RUN += ["algo.sgd_minibatch_size=64", "model.hidden=[8]", "log.every=128", "eval.every=512", "eval.episodes=1"]
RUN += ["hardware=cpu", "logger.only=[trackio]", "checkpoint.every=384"]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Keep Trackio's database in the test's folder; it reads TRACKIO_DIR when it is imported."""
    folder = tmp_path / "trackio"
    for module in list(sys.modules.values()):
        for name, part in (("TRACKIO_DIR", ""), ("MEDIA_DIR", "media"), ("ARTIFACTS_DIR", "artifacts")):
            if getattr(module, "__name__", "").startswith("trackio") and hasattr(module, name):
                monkeypatch.setattr(module, name, folder / part)
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    return folder


def rows(project="rlplug"):
    (name,) = trackio.SQLiteStorage.get_runs(project)
    return name, trackio.SQLiteStorage.get_logs(project, name)


def curve(metric):
    return [(row["step"], row[metric]) for row in rows()[1] if metric in row]


def table(folder):
    """Return step and metrics of the rows of metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]


def test_a_run_is_there_with_its_configuration_a_video_and_the_best_weights(tmp_path, store):
    train([*RUN, "eval.record=1", f"hydra.run.dir={tmp_path / 'run'}"])
    name, _ = rows()
    identity = json.loads((tmp_path / "run" / "manifest.json").read_text())["run"]
    assert name == f"run-{identity[:8]}"
    config = trackio.SQLiteStorage.get_run_config("rlplug", name)
    assert (config["algo"]["name"], config["total_steps"]) == ("ppo", 1024)
    for metric in ("train/policy", "eval/return_mean"):
        logged = {int(row["step"]): row[metric] for row in table(tmp_path / "run") if metric in row}
        assert dict(curve(metric)) == pytest.approx(logged)
        assert len(curve(metric)) == len(logged) > 1
    assert len(curve("eval/video")) == len(list((tmp_path / "run" / "videos").iterdir()))
    assert len(list(store.rglob("*.mp4"))) == len(curve("eval/video"))
    best = (tmp_path / "run" / "checkpoints" / "best").resolve()
    blobs = {file.read_bytes() for file in (store / "artifacts").rglob("*") if file.is_file()}
    assert {(best / file).read_bytes() for file in ("manifest.json", "weights.pt")} <= blobs


def test_a_killed_and_resumed_run_has_each_metric_once_per_step(tmp_path, store):
    folder = tmp_path / "run"
    words = [*RUN, "total_steps=20000", f"hydra.run.dir={folder}"]
    killed = subprocess.Popen([sys.executable, "-m", "rlplug", *words], stderr=subprocess.PIPE)
    for _ in range(1200):
        database = next(store.glob("*.db"), None)
        if database and len(list((folder / "checkpoints").glob("step_*"))) > 1 and _count(database) > 20:
            break
        time.sleep(0.05)
        assert killed.poll() is None, killed.stderr.read()
    killed.kill()
    killed.wait()
    killed.stderr.close()
    resume(folder, ["total_steps=20000"], tell=lambda line: None)
    for metric in ("train/policy", "episode/return", "eval/return_mean"):
        logged = {int(row["step"]): row[metric] for row in table(folder) if metric in row}
        found = curve(metric)
        assert len(found) == len(logged)
        assert dict(found) == pytest.approx(logged)


def _count(database: Path) -> int:
    connection = sqlite3.connect(database)
    try:
        return connection.execute("select count(*) from metrics").fetchone()[0]
    except sqlite3.OperationalError:  # the table is not there yet
        return 0
    finally:
        connection.close()


def test_without_a_token_a_space_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("rlplug_trackio.logger.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"^logger\.trackio\.space_id: needs a token .* null logs offline"):
        Trackio(testing.config("logger/trackio", space_id="me/runs"), None)

"""Runs of MLflow's own client in its file store, which is read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplug.types import ConfigError

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mlruns"


def only(experiment: str = "rlplug") -> tuple[Any, Any]:
    """Return the client and the only run of an experiment."""
    client = mlflow.MlflowClient(str(Path("mlruns").absolute()))
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, found


def values(name: str) -> list[tuple[int, float]]:
    client, found = only()
    return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]


def test_a_run_has_its_configuration_and_metrics_at_their_steps(run, logger, store):
    run.start(logger("mlflow", tags={"paper": "x"}, notes="why"))
    run.log(100, {"train/critic": 0.5})
    run.log(200, {"train/critic": 0.25, "episode/return": -1200.0})
    run.evaluate(-300.25, 40.0)
    run.end()
    client, found = only()
    assert store.is_dir()
    assert values("train/critic") == [(100, 0.5), (200, 0.25)]
    assert values("eval/return_mean") == [(200, -300.25)]
    assert (found.info.status, found.info.run_name) == ("FINISHED", "sac-pendulum/2030-01-02_03-04-05-s3")
    params = {"algo.name": "sac", "algo.gamma": "0.99", "algo.hiddens": "[256, 256]", "algo.grad_clip": "None"}
    assert found.data.params.items() >= params.items()
    tags = {"paper": "x", "mlflow.note.content": "why", "mlflow.source.git.commit": "c" * 40}
    assert found.data.tags.items() >= tags.items()
    config = yaml.safe_load(mlflow.artifacts.load_text(f"{found.info.artifact_uri}/config.yaml"))
    assert config == run.config.raw
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["config.yaml"]


@pytest.mark.parametrize(("status", "says"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_the_status_says_how_the_run_ended(run, logger, status, says):
    run.start(logger("mlflow"))
    run.end(status)
    assert only()[1].info.status == says


def test_a_continued_run_is_the_same_run_with_every_metric_once_per_step(run, logger, store):
    first = logger("mlflow")
    run.start(logger("csv"), first)
    for step in (100, 200, 300):
        run.log(step, {"train/critic": step / 100})
    assert only()[1].info.status == "RUNNING"  # a killed one does not end

    again = type(run)(run.run_dir)
    again.progress.env_steps, again.logged = 200, 2
    again.config.raw["total_steps"] = 2000
    again.start(logger("csv"), logger("mlflow"))
    again.log(300, {"train/critic": 3.0})
    again.log(400, {"train/critic": 4.0})
    again.end()
    assert values("train/critic") == [(100, 1.0), (200, 2.0), (300, 3.0), (400, 4.0)]
    _, found = only()
    assert found.info.status == "FINISHED"
    assert yaml.safe_load(mlflow.artifacts.load_text(f"{found.info.artifact_uri}/config.yaml"))["total_steps"] == 2000


def test_a_logger_that_is_added_to_a_resumed_run_has_the_whole_run(run, logger):
    run.start(logger("csv"))
    for step in (100, 200, 300):
        run.log(step, {"train/critic": step / 100})
    again = type(run)(run.run_dir)
    again.progress.env_steps, again.logged = 200, 2
    again.start(logger("csv"), logger("mlflow"))
    again.log(300, {"train/critic": 3.0})
    again.end()
    assert values("train/critic") == [(100, 1.0), (200, 2.0), (300, 3.0)]


def test_the_video_and_the_best_weights_are_there(evaluated, logger):
    evaluated.start(logger("mlflow"))
    evaluated.evaluate(-300.25, 40.0)
    evaluated.end()
    client, found = only()
    files = {file.path for folder in ("videos", "best") for file in client.list_artifacts(found.info.run_id, folder)}
    assert files == {"videos/step_000000000200.mp4", "best/manifest.json", "best/weights.pt"}


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "/proc/none", "nothing://x"])
def test_a_store_that_cannot_be_opened_is_refused_before_the_run(logger, uri):
    with pytest.raises(ConfigError) as error:
        logger("mlflow", tracking_uri=uri)
    assert error.value.key == "logger.mlflow.tracking_uri"
    assert error.value.message.startswith(f"{uri} cannot be opened (")
    assert "\n" not in error.value.message
    assert error.value.message.endswith("take a folder to log offline: logger.mlflow.tracking_uri=mlruns")


def test_without_mlflow_it_says_what_to_install(logger, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"^logger.mlflow: needs MLflow .*pip install 'rlplug\[mlflow\]'$"):
        logger("mlflow")

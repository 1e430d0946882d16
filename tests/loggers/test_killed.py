"""A real run with every tracker is killed and resumed: each of them has what metrics.csv has, once per step."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlplug.checkpointing.format import checkpoints
from rlplug.run import launch
from tests.loggers.test_wandb_logger import items, read
from tests.tools.kill import Process, warm_up

mlflow = pytest.importorskip("mlflow")
RUN = ["algo=ppo", "env=cartpole", "tuned=none", "num_envs=2", "rollout_fragment_length=64", "total_steps=16384"]
RUN += ["algo.sgd_minibatch_size=64", "algo.num_sgd_iter=1", "model.hidden=[8]", "eval.every=4096", "eval.episodes=1"]
RUN += ["hardware=cpu", "logger.only=[tensorboard,wandb,mlflow]", "log.every=256", "checkpoint.every=1280"]
RUN += ["eval.record=1"]


def values(folder: Path) -> dict[str, Counter[tuple[str, int]]]:
    """Return how often each tracker has each metric of a run at each step."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [({name for name in row if row[name]} - {"step"}, int(row["step"])) for row in csv.DictReader(file)]
    found = {"csv": Counter({(name, step) for names, step in rows for name in names})}
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found["tensorboard"] = Counter((n, event.step) for n in events.Tags()["scalars"] for event in events.Scalars(n))
    logged = [items(record.history.item) for record in read(folder) if record.HasField("history")]
    found["wandb"] = Counter((name, row["env_steps"]) for row in logged for name in row if name[0] != "_")
    client = mlflow.MlflowClient(str(folder.parent / "mlruns"))
    (run,) = client.search_runs([client.get_experiment_by_name("rlplug").experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    found["mlflow"] = Counter((name, metric.step) for name, history in histories.items() for metric in history)
    return found


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_tracker_has_each_metric_once_per_step(kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    warm_up(RUN)
    words: list[str] | None = RUN
    for kill in range(kills):
        before = len(list((folder / "checkpoints").glob("step_*"))) and checkpoints(folder)[0]
        process = Process(folder, words)
        assert process.wait(
            lambda before=before, rows=8 * (kill + 1): (
                folder.exists()
                and bool(checkpoints(folder))
                and checkpoints(folder)[0] != before
                and (folder / "metrics.csv").exists()
                and (folder / "metrics.csv").read_text().count("\n") > rows
            )
        )
        process.kill()
        words = None
        time.sleep(1)  # W&B names its folders by id and second
    launch.resume(folder, tell=lambda line: None)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    wandb.teardown()
    found = values(folder)
    assert len(found["csv"]) > 500
    assert found["tensorboard"] == found["csv"]
    assert found["mlflow"] == found["csv"]
    own = Counter({key: n for key, n in found["wandb"].items() if key[0] != "env_steps" and "video" not in key[0]})
    assert own == found["csv"]
    videos = {int(video.stem.removeprefix("step_")) for video in (folder / "videos").iterdir()}
    assert {step: n for (name, step), n in found["wandb"].items() if name == "eval/video/path"} == dict.fromkeys(
        videos, 1
    )

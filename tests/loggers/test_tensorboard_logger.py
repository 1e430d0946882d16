"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(metric)]


def configs(folder: Path) -> list[Any]:
    texts = [event.tensor_proto.string_val[0].decode() for event in read(folder).Tensors("config/text_summary")]
    return [json.loads(text.removeprefix("```json\n").removesuffix("\n```")) for text in texts]


def test_a_run_has_its_configuration_and_metrics_at_their_steps(run, logger):
    run.start(logger("tensorboard"))
    run.log(100, {"train/critic": 0.5})
    run.log(200, {"train/critic": 0.25, "episode/return": -1200.0})
    run.evaluate(-300.25, 40.0)
    run.end()
    assert configs(run.run_dir) == [run.config.raw]
    assert curve(run.run_dir, "train/critic") == [(100, 0.5), (200, 0.25)]
    assert curve(run.run_dir, "episode/return") == [(200, -1200.0)]
    assert curve(run.run_dir, "eval/return_mean") == [(200, -300.25)]


def test_a_continued_run_has_every_metric_once_per_step(run, logger):
    """The first process is killed after step 300, and its last checkpoint is that of step 200."""
    first = logger("tensorboard")
    run.start(first)
    for step in (100, 200, 300):
        run.log(step, {"train/critic": step / 100})
    first._writer.flush()

    again = type(run)(run.run_dir)
    again.progress.env_steps, again.logged = 200, 2
    again.start(logger("tensorboard"))
    again.log(300, {"train/critic": 3.5})
    again.log(400, {"train/critic": 4.0})
    again.end()
    assert curve(run.run_dir, "train/critic") == [(100, 1.0), (200, 2.0), (300, 3.5), (400, 4.0)]
    assert configs(run.run_dir)[-1] == run.config.raw

import csv
import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def rows(run) -> list[dict[str, str]]:
    with (run.run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def columns(run) -> list[str]:
    return (run.run_dir / "metrics.csv").read_text().splitlines()[0].split(",")


def test_columns_stand_in_order_of_appearance_and_are_blank_where_a_row_has_none(run, logger):
    run.start(logger("csv"))
    run.log(100, {"time/wall_s": 1.5})
    run.log(200, {"time/wall_s": 2.5, "train/critic": 0.1})
    run.evaluate(-300.25, 40.0)
    run.log(300, {"train/critic": 0.3, "time/wall_s": 3.5})
    assert columns(run) == ["step", "time/wall_s", "train/critic", "eval/return_mean", "eval/return_std"]
    assert [list(row.values()) for row in rows(run)] == [
        ["100", "1.5", "", "", ""],
        ["200", "2.5", "0.1", "", ""],
        ["200", "", "", "-300.25", "40.0"],
        ["300", "3.5", "0.3", "", ""],
    ]


def test_each_row_is_in_the_file_at_once_with_every_digit(run, logger):
    run.start(logger("csv"))
    values = np.random.default_rng(0).standard_normal(20).tolist()
    for step, value in enumerate(values):
        run.log(step, {"train/critic": value})
        assert [float(row["train/critic"]) for row in rows(run)] == values[: step + 1]


def test_names_with_commas_and_values_that_are_not_finite_survive(run, logger):
    run.start(logger("csv"))
    run.log(1, {"a,b": float("nan"), 'say "c"': float("inf")})
    assert rows(run) == [{"step": "1", "a,b": "nan", 'say "c"': "inf"}]


def test_nothing_but_the_table_is_left_in_the_folder(run, logger):
    run.start(logger("csv"))
    for step in range(5):
        run.log(step, {f"train/{step}": 1.0})
    run.end()
    assert [path.name for path in run.run_dir.iterdir()] == ["metrics.csv"]


def test_a_continued_run_drops_what_lies_behind_its_checkpoint_and_a_half_written_line(run, logger):
    run.start(logger("csv"))
    for step in (100, 200, 200):
        run.log(step, {"train/critic": step / 10})
    run.log(200, {"eval/return_mean": 1.0})
    with (run.run_dir / "metrics.csv").open("a") as file:
        file.write("400,4")

    again = type(run)(run.run_dir)
    again.progress.env_steps, again.logged = 200, 2
    again.start(logger("csv"))
    again.log(300, {"train/critic": 31.0, "train/actor": 1.0})
    assert [list(row.values()) for row in rows(run)] == [
        ["100", "10.0", ""],
        ["200", "20.0", ""],
        ["300", "31.0", "1.0"],
    ]


def test_a_continued_run_says_that_rows_are_missing(run, logger):
    run.logged = 3
    with pytest.warns(UserWarning, match=r"metrics\.csv has 0 of the 3 rows"):
        run.start(logger("csv"))


def read(run) -> EventAccumulator:
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    return events


def scalars(run, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run).Scalars(name)]


def test_metrics_stand_at_their_environment_steps(run, logger):
    run.start(logger("tensorboard"))
    run.log(100, {"train/critic": 0.5})
    run.log(200, {"train/critic": 0.25, "episode/return": -1200.0})
    run.evaluate(-300.25, 40.0)
    run.end()
    assert scalars(run, "train/critic") == [(100, 0.5), (200, 0.25)]
    assert scalars(run, "episode/return") == [(200, -1200.0)]
    assert scalars(run, "eval/return_mean") == [(200, -300.25)]


def test_the_configuration_is_there_as_a_text(run, logger):
    run.start(logger("tensorboard"))
    run.end()
    (event,) = read(run).Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert json.loads(text.removeprefix("```json").removesuffix("```")) == run.config.raw


def test_a_continued_run_hides_what_lies_behind_its_step(run, logger):
    run.start(logger("tensorboard"))
    for step in (100, 200, 300):
        run.log(step, {"train/critic": step / 100})
    run.end("failed")

    again = type(run)(run.run_dir)
    again.progress.env_steps = 200
    again.start(logger("tensorboard"))
    again.log(250, {"train/critic": 7.0})
    again.end()
    assert scalars(run, "train/critic") == [(100, 1.0), (200, 2.0), (250, 7.0)]

    anew = type(run)(run.run_dir)  # killed before its first checkpoint
    anew.start(logger("tensorboard"))
    anew.log(100, {"train/critic": 8.0})
    anew.end()
    assert scalars(run, "train/critic") == [(100, 8.0)]

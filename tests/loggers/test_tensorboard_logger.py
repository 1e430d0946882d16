import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


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

import json

import pytest
import rlplug
from rlplug import testing

from rlplug_ramp.loop import Ramp


def build(ratio, **options):
    return Ramp(testing.config("loop/ramp", **options), testing.context(replay_ratio=ratio, learning_starts=10))


def test_the_ratio_grows_evenly_and_stays():
    loop = build(0.5, ramp_steps=100)
    assert [loop.updates(10 + steps) for steps in (-10, 0, 20, 100, 200)] == [0, 0, 1, 25, 75]
    per_step = [loop.updates(10 + at + 40) - loop.updates(10 + at) for at in (0, 30, 60, 100, 500)]
    assert per_step == [4, 10, 16, 20, 20]


def test_without_a_ratio_it_is_refused():
    with pytest.raises(rlplug.ConfigError, match="replay_ratio: loop=ramp lets it grow to a number"):
        build(None)


def test_it_makes_the_updates_that_it_foresees(tmp_path):
    words = [
        "algo=dqn",
        "loop=ramp",
        "loop.ramp_steps=400",
        "tuned=none",
        "total_steps=600",
        "logger.only=[]",
        "num_envs=2",
    ]
    words += ["num_steps_sampled_before_learning_starts=100", "eval.episodes=1", f"hydra.run.dir={tmp_path}"]
    rlplug.train([*words, "replay_ratio=0.1"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["updates"] == int(0.1 * (400 / 2 + summary["env_steps"] - 500))

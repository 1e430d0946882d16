"""``env=recorded`` with spaces written in the configuration, for datasets of other software."""

from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import rlplug
from rlplug import testing
from rlplug.plugins.env.recorded import space_of
from rlplug.types import ConfigError

SMALL = Path(testing.__file__).parent / "cartpole.npz"  # has no spaces
WORDS = ["algo=bc", "env=recorded", f"data.path={SMALL}", "hardware=cpu", "logger.only=[]", "total_steps=4"]


def test_a_dataset_without_its_environment_is_learned_from(tmp_path):
    words = [*WORDS, "env.observation_space={shape: [4]}", "env.action_space={n: 2}"]
    result = rlplug.train(words, folder=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert result.agent.act(np.zeros(4, np.float32)) in (0, 1)


def test_spaces():
    assert space_of("env.action_space", {"n": 3}) == Discrete(3)
    assert space_of("env.action_space", {"nvec": [2, 3]}) == MultiDiscrete([2, 3])
    box = space_of("env.action_space", {"shape": [2], "low": [-1, -2], "high": 1})
    assert box == Box(np.float32([-1, -2]), np.float32([1, 1]))
    assert space_of("env.observation_space", {"shape": [3]}) == Box(-np.inf, np.inf, (3,), np.float32)
    image = {"shape": [8, 8, 3], "low": 0, "high": 255, "dtype": "uint8"}
    assert space_of("env.observation_space", image) == Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"^env\.observation_space: is missing; write .*, or name files with env\.path"),
        (["env.action_space={n: 2}"], r"^env\.observation_space: is missing; write \{shape: \[4\]"),
        (["env.path=x", "env.action_space={n: 2}"], r"^env\.observation_space: is missing, but the other space is wri"),
        (
            ["env.observation_space={m: 2}", "env.action_space={n: 2}"],
            r"^env\.observation_space: \{'m': 2\} is no space",
        ),
        (
            ["env.observation_space={n: 4}", "env.action_space={n: 2, low: 1}"],
            r"^env\.action_space: .* is no space; wri",
        ),
        (
            ["env.observation_space={n: 4}", "env.action_space={n: 2}", "env.path=x"],
            r"^env\.path: has spaces of its own",
        ),
        (
            ["env.observation_space={n: -1}", "env.action_space={n: 2}"],
            r"^env\.observation_space: .* have to be positive",
        ),
    ],
)
def test_bad_input(words, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        rlplug.train([*WORDS, *words], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""Metrics of an environment's own from actors are those of one process: of training, of jobs and of evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplug.config import compose
from rlplug.run.launch import train
from tests.actors.conftest import TWO
from tests.evaluation.test_own_metrics import ES, PPO, columns

NAMES = ("step", "episode/steps", "episode/odd", "episode/half", "eval/steps", "eval/odd", "eval/half")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "words",
    [(*ES, "num_envs=2"), (*PPO, "log.every=32", "eval.every=32", "hardware.actors.evaluation=2")],
    ids=["jobs of es", "evaluations on actors"],
)
def test_two_actors_log_the_metrics_of_one_process(words: tuple[str, ...], tmp_path: Path):
    alone = [word for word in words if not word.startswith("hardware.actors")]
    train(compose(alone), tmp_path / "one")
    train(compose([*words, *TWO]), tmp_path / "two")
    one, two = (columns(tmp_path / name, *NAMES) for name in ("one", "two"))
    assert min(map(len, one)) > 0
    assert [sorted(values) for values in one[1:]] == [sorted(values) for values in two[1:]]

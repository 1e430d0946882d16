"""Actors play candidates: the update is that of one process, to the bit, also if one of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplug.cli import main
from rlplug.config import compose
from rlplug.testing.comparing import compare_runs
from tests.actors.conftest import TWO, processes
from tests.plugins.test_population import RUNS, SMALL, assert_same, updated


@pytest.mark.usefixtures("cluster")
def test_two_actors_make_the_update_of_one_process_even_if_one_is_killed(capfd: pytest.CaptureFixture[str]):
    words = (*SMALL, *RUNS["ars"], "num_envs=2", "preprocess.normalize_obs=true")
    alone = updated(None, compose([*words]).raw)
    both = updated(None, compose([*words, *TWO]).raw, lambda: processes()[0].kill())
    assert_same(alone, both)
    assert "its process died" in capfd.readouterr().err


@pytest.mark.parametrize(
    "algo",
    [
        "algo=ars env=cartpole algo.num_rollouts=6 algo.rollouts_used=3",
        pytest.param("algo=maml env=point_goals algo.meta_batch_size=3 loop.episodes=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_actors_that_is_resumed_equals_one_process(algo: str, tmp_path: Path):
    """Jobs carry their seeds, so it does not matter who plays them after a resume."""
    words = (*algo.split(), "tuned=none", "logger.only=[]", "eval.every=0", "eval.episodes=1", "hardware=cpu")
    words = (*words, "num_envs=2", "total_steps=4_500", "checkpoint.every=1_000")
    assert main([*words, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    assert main([*words, *TWO, "stop={updates: 1}", f"hydra.run.dir={tmp_path / 'parts'}"]) == 0
    assert compare_runs(tmp_path / "whole", tmp_path / "parts")["weights"][1]
    assert main(["resume", str(tmp_path / "parts"), "stop=null"]) == 0
    equal, different = compare_runs(tmp_path / "whole", tmp_path / "parts")["weights"]
    assert (equal > 3, different) == (True, [])

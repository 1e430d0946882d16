"""Actors play candidates: the update is that of one process, to the bit, also if one of them dies."""

from __future__ import annotations

import pytest

from rlplug.config import compose
from tests.actors.conftest import TWO, processes
from tests.plugins.test_population import RUNS, SMALL, assert_same, updated


@pytest.mark.usefixtures("cluster")
def test_two_actors_make_the_update_of_one_process_even_if_one_is_killed(capfd: pytest.CaptureFixture[str]):
    words = (*SMALL, *RUNS["ars"], "num_envs=2", "preprocess.normalize_obs=true")
    alone = updated(None, compose([*words]).raw)
    both = updated(None, compose([*words, *TWO]).raw, lambda: processes()[0].kill())
    assert_same(alone, both)
    assert "its process died" in capfd.readouterr().err

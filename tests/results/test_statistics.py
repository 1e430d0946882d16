"""Statistics against values by hand, and against those of rliable 1.2.0 (rliable.json), which drew the same runs.

``rliable.json`` holds scores ``[runs, tasks]`` of two methods, rliable's figures, and for each of its bootstraps the
indices that it drew: ``[reps, runs, tasks]``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplug.results import statistics
from rlplug.results.statistics import (
    improvement,
    improvement_interval,
    iqm,
    iqm_interval,
    mean_band,
    profile,
    profile_band,
    resampled,
    scaled,
)

RLIABLE = json.loads(Path(__file__).with_name("rliable.json").read_text())


def tasks(scores: Any) -> list[np.ndarray]:
    return [*np.array(scores).T]


def same_draws(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[Any, Any]) -> None:
    """Have the runs drawn that were drawn for rliable: pairs of scores ``[R, T]`` and indices ``[reps, R, T]``."""
    drawn = [
        np.array(scores)[:, task][np.array(indices)[:, :, task]]
        for scores, indices in pairs
        for task in range(np.array(scores).shape[1])
    ]
    monkeypatch.setattr(statistics, "resampled", lambda methods, reps, seed: iter([drawn]))


@pytest.mark.parametrize("example", RLIABLE)
@pytest.mark.parametrize("method", ["x", "y"])
def test_one_method_as_in_rliable(example: str, method: str, monkeypatch: pytest.MonkeyPatch):
    known = RLIABLE[example]
    scores, thresholds = tasks(known[method]), np.array(known["thresholds"])
    assert iqm(scores) == pytest.approx(known[f"iqm_{method}"], abs=1e-6)
    assert profile(scores, thresholds) == pytest.approx(np.array(known[f"profile_{method}"]), abs=1e-6)
    same_draws(monkeypatch, (known[method], known[f"draws_iqm_{method}"]))
    assert iqm_interval(scores) == pytest.approx(known[f"iqm_interval_{method}"], abs=1e-6)
    same_draws(monkeypatch, (known[method], known[f"draws_profile_{method}"]))
    assert profile_band(scores, thresholds) == pytest.approx(np.array(known[f"profile_band_{method}"]), abs=1e-6)


@pytest.mark.parametrize("example", RLIABLE)
def test_improvement_as_in_rliable(example: str, monkeypatch: pytest.MonkeyPatch):
    known = RLIABLE[example]
    x, y = tasks(known["x"]), tasks(known["y"])
    assert improvement(x, y) == pytest.approx(known["improvement"], abs=1e-6)
    draws = zip(*known["draws_improvement"], strict=True)
    same_draws(monkeypatch, *zip((known["x"], known["y"]), draws, strict=True))
    assert improvement_interval(x, y) == pytest.approx(known["improvement_interval"], abs=1e-6)


def test_the_interquartile_mean_by_hand():
    assert iqm([np.array([0.0, 1.0, 2.0, 99.0])]) == 1.5
    assert iqm([np.array([3.0, 1.0, 2.0])]) == 2.0  # too few to leave one out
    assert iqm([np.array([0.0, 1.0]), np.array([2.0, 99.0, 98.0, -99.0, -98.0, 3.0])]) == 1.5
    assert iqm([np.array([7.0])]) == 7.0


def test_improvement_by_hand():
    x, y = np.array([1.0, 2.0]), np.array([0.0, 2.0, 3.0])
    assert improvement([x], [y]) == pytest.approx((1 + 1 + 0.5) / 6)
    assert improvement([y], [x]) == pytest.approx(1 - (1 + 1 + 0.5) / 6)
    assert improvement([x, x], [y, x]) == pytest.approx(((1 + 1 + 0.5) / 6 + 0.5) / 2)


def test_profiles_by_hand():
    scores = [np.array([0.0, 1.0]), np.array([1.0, 2.0])]
    assert profile(scores, np.array([-1.0, 0.0, 0.5, 1.0, 2.0])).tolist() == [1.0, 0.75, 0.75, 0.25, 0.0]


def test_a_bootstrap_of_all_draws_by_hand():
    """Three runs have 27 draws, and 1/27 of them is more than 2.5 %: the ends are those of the scores."""
    scores = np.array([1.0, 5.0, 6.0])
    assert iqm_interval([scores], reps=20_000) == (1.0, 6.0)
    band = mean_band(np.stack([scores, 2 * scores], 1), reps=20_000)
    assert band == pytest.approx(np.array([[1.0, 2.0], [6.0, 12.0]]))


def test_draws_are_of_each_task_and_all_are_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "MOST", 35)
    parts = [*resampled([[np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])]], 30, 0)]
    assert [len(part[0]) for part in parts] == [7, 7, 7, 7, 2]
    first, second = (np.concatenate([part[i] for part in parts]) for i in range(2))
    assert (first.shape, second.shape) == ((30, 2), (30, 3))
    assert {*first.ravel()} == {1.0, 2.0}
    assert {*second.ravel()} == {3.0, 4.0, 5.0}
    assert len({tuple(row) for row in second}) > 10


def test_scores_are_scaled_by_the_worst_and_the_best_run_of_a_task():
    a, b = scaled([[np.array([0.0, 5.0]), np.array([3.0])], [np.array([10.0]), np.array([3.0, 3.0])]])
    assert [task.tolist() for task in a] == [[0.0, 0.5], [0.0]]
    assert [task.tolist() for task in b] == [[1.0], [0.0, 0.0]]

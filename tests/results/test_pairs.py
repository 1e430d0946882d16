"""Forks in a report: which runs are pairs, and their intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlplug.cli import main
from rlplug.results.groups import grouped
from rlplug.results.pairs import pairings
from rlplug.results.record import read
from rlplug.results.statistics import paired_interval, pairing_gain, unpaired_interval
from tests.results.conftest import Make

METRIC = "eval/return_mean"
BASE = np.array([10.0, 20.0, 30.0, 45.0])
GAIN = np.array([1.0, 2.0, 1.0, 2.0])


def fork(folder: Path, origin: Path, step: int) -> Path:
    path = folder / "manifest.json"
    identity = json.loads((origin / "manifest.json").read_text())["run"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"forked": {"identity": identity, "step": step}}))
    return folder


@pytest.fixture
def runs(make: Make) -> list[Path]:
    """Four runs, a fork of each at step 20 with another discount, and two of one at step 10."""
    rows = {METRIC: [1.0, 2.0]}
    bases = [make(f"base{i}", rows, score=score, seed=i) for i, score in enumerate(BASE)]
    forks = [
        fork(make(f"fork{i}", rows, score=score, seed=i, algo__gamma=0.5), bases[i], 20)
        for i, score in enumerate(BASE + GAIN)
    ]
    early = [fork(make(f"early{g}", rows, score=5.0, seed=0, algo__gamma=g), bases[0], 10) for g in (0.6, 0.7)]
    return [*bases, *forks, *early]


def test_runs_are_paired_by_checkpoint(runs: list[Path]):
    groups = grouped([read(run) for run in runs])
    assert [len(group.runs) for group in groups] == [4, 4, 1, 1]
    found = {(groups.index(one.first), groups.index(one.second)): one for one in pairings(groups, METRIC)}
    assert found.keys() == {(0, 1), (0, 2), (0, 3), (2, 3)}  # not forks of other steps
    assert np.array_equal(found[0, 1].x, BASE)
    assert np.array_equal(found[0, 1].y, BASE + GAIN)


def test_a_fork_is_no_run_of_its_settings(make: Make):
    rows = {METRIC: [1.0, 2.0]}
    base, same = make("base", rows, score=1.0), make("same", rows, score=1.0, algo__gamma=0.5, seed=2)
    forked = fork(make("forked", rows, score=1.0, algo__gamma=0.5), base, 20)
    groups = grouped([read(run) for run in (base, same, forked)])
    assert [len(group.runs) for group in groups] == [1, 1, 1]
    assert len({group.label for group in groups}) == 3


def test_the_intervals():
    assert paired_interval(BASE + GAIN, BASE) == (1.0, 2.0)
    low, high = unpaired_interval(BASE + GAIN, BASE, seed=1)
    assert low < -10 < 10 < high
    assert paired_interval(BASE + 3, BASE) == (3.0, 3.0)
    expected = (np.var(BASE, ddof=1) + np.var(BASE + GAIN, ddof=1)) / np.var(GAIN, ddof=1)
    assert pairing_gain(BASE + GAIN, BASE) == pytest.approx(expected)
    assert pairing_gain(BASE + 3, BASE) == np.inf


def test_independent_runs_gain_nothing():
    x, y = np.random.default_rng(0).normal(size=(2, 2_000))
    assert pairing_gain(x, y) == pytest.approx(1, abs=0.1)
    ends = np.subtract(unpaired_interval(x, y), paired_interval(x, y))
    assert np.abs(ends).max() < 0.01


def test_the_report_has_a_row_for_each_pair_of_groups(runs: list[Path], tmp_path: Path):
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Forks</h2>" in page
    assert "-2.00 to -1.00" in page


def test_without_forks_there_is_no_such_section(make: Make, tmp_path: Path):
    run = make("base", {METRIC: [1.0, 2.0]}, score=1.0)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "Forks" not in (tmp_path / "page.html").read_text()

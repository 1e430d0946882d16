"""What an algorithm computes does not change unnoticed: its loss terms over 20 updates against committed curves.

A change of the curves on purpose is `make golden`, and its difference is read before it is committed.

The tolerance is for processors that round otherwise. Measured: weights perturbed by 1e-6 relative (a rounding is
6e-8) change no curve by more than a third of it within the 20 updates, and no sampled action. ``ATOL`` is for values
that are small differences of large ones: the mean of normalised advantages, the KL of almost equal policies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlplug.config import compose, option_names
from rlplug.run.build import build
from rlplug.testing.checks.runs import play
from tests.golden.cases import CASES, FEWER, UPDATES, overrides

RTOL, ATOL = 1e-4, 2e-6
FOLDER = Path(__file__).parent

Curves = dict[str, list[float]]


def run(case: str, *more: str) -> Curves:
    """Every term and metric of ``UPDATES`` (or ``FEWER``) updates; a part that is not always due has some of them."""
    trainer = build(compose([*overrides(case), *more]), Path())
    losses = play(trainer, FEWER.get(case, UPDATES)).losses
    trainer.close()
    names = dict.fromkeys(name for values in losses for name in values)
    return {name: [float(values[name]) for values in losses if name in values] for name in names}


def departures(found: Curves, golden: Curves) -> list[str]:
    """A line for each curve that is not the golden one."""
    lines = [f"{name}: only {'found' if name in found else 'golden'}" for name in found.keys() ^ golden.keys()]
    for name in found.keys() & golden.keys():
        for update, (x, y) in enumerate(zip(found[name], golden[name], strict=True), 1):
            if not math.isclose(x, y, rel_tol=RTOL, abs_tol=ATOL):
                lines.append(f"{name}: {x:.9g} at update {update}, golden {y:.9g}")
                break
    return sorted(lines)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, update_golden: bool):
    for kind in ("algo", "env"):
        if (option := CASES[case][kind]) not in option_names(kind):
            pytest.skip(f"rlplug-{option} is not installed")
    path, found = FOLDER / f"{case}.json", run(case)
    if update_golden:
        rounded = {name: [float(f"{value:.9g}") for value in values] for name, values in found.items()}
        path.write_text(json.dumps(rounded, indent=1) + "\n")
        return
    lines = departures(found, json.loads(path.read_text()))
    assert not lines, "\n".join([f"{case} is not what it was; if that was meant, run `make golden`", *lines])


def test_a_small_change_of_a_coefficient_is_noticed():
    golden = json.loads((FOLDER / "ppo_cartpole.json").read_text())
    changed = departures(run("ppo_cartpole", "algo.gamma=0.991"), golden)
    assert any(line.startswith("value: ") and "at update 1" in line for line in changed)

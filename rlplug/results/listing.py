"""Figures of runs and sweeps, as lists show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplug.results.find import Sweep
from rlplug.results.record import EVALUATION, TRAINING, RunRecord

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def figures(run: RunRecord) -> dict[str, Any]:
    """Return what a list shows of a run, as plain values."""
    return {
        "run": str(run.path),
        "state": run.state,
        "algo": run.algo,
        "env": run.env,
        "seed": run.config.get("seed"),
        "steps": run.steps,
        "total_steps": run.config.get("total_steps"),
        "unit": run.unit,
        EVALUATION: run.last(EVALUATION),
        TRAINING: run.last(TRAINING),
        "age_s": round(run.age_s, 1),
    }


def row(of: Mapping[str, Any]) -> tuple[str, ...]:
    """Format ``figures`` as cells."""
    steps = f"{of['steps']:,}" if of["state"] == "finished" else f"{of['steps']:,} of {of['total_steps']:,}"
    returns = (number(of[EVALUATION]), number(of[TRAINING]))
    return (of["state"], of["algo"], of["env"], str(of["seed"]), steps, *returns, ago(of["age_s"]), of["run"])


ROW = ("state", "algo", "env", "seed", "steps", "evaluation", "training", "age", "run")


def sweep_figures(sweep: Sweep) -> dict[str, Any]:
    """Return what a list shows of a sweep, as plain values."""
    best = sweep.best
    score = best and best.last(EVALUATION)
    return {"sweep": str(sweep.path), "states": dict(sweep.states), "best": best and str(best.path), EVALUATION: score}


def sweep_row(of: Mapping[str, Any]) -> tuple[str, ...]:
    """Format ``sweep_figures`` as cells."""
    states = ", ".join(f"{n} {state}" for state, n in of["states"].items())
    return (str(sum(of["states"].values())), states, number(of[EVALUATION]), of["sweep"])


SWEEP_ROW = ("jobs", "states", "best evaluation", "sweep")


def ago(seconds: float) -> str:
    """Format a time that has passed, in its largest unit."""
    return next((f"{seconds / of:.0f} {unit}" for unit, of in UNITS if seconds >= of), f"{seconds:.0f} s")


def number(value: float | None) -> str:
    """Format a figure compactly; an empty string if there is none."""
    if value is None:
        return ""
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:,.1f}" if 10 <= abs(value) < 1e6 else f"{value:.3g}"

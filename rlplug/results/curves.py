"""Curves of groups of runs: a metric against the run's steps, with its mean and band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlplug.config.errors import refuse
from rlplug.registry.discovery import unknown
from rlplug.results.groups import Group
from rlplug.results.record import EVALUATION, TRAINING, RunRecord, read_metrics, step_label
from rlplug.results.statistics import mean_band
from rlplug.types import ConfigError

POINTS = 400  # of a curve whose runs have logged at different steps, at most
NAMES = {
    EVALUATION: "evaluation return",
    TRAINING: "training return",
    "eval/length_mean": "evaluation episode length (steps)",
    "episode/length": "training episode length (steps)",
    "time/env_steps_per_s": "environment steps per second",
    "time/updates_per_s": "updates per second",
}


@dataclass(frozen=True)
class Curve:
    """One metric of a group of runs.

    Attributes:
        steps: ``[P]``.
        values: of each run, ``[R, P]``.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Return the mean over the runs, ``[P]``."""
        return self.values.mean(0)

    @property
    def band(self) -> np.ndarray | None:
        """Return the 95 % bootstrap interval of the mean, ``[2, P]``; None for one run."""
        return mean_band(self.values) if len(self.values) > 1 else None


def with_metrics(runs: Sequence[RunRecord], tell: Callable[[str], None]) -> Sequence[RunRecord]:
    """Return the runs that have logged metrics, and tell of the others; all runs if none has."""
    if not (logged := [run for run in runs if run.metrics]):
        return runs
    for run in runs:
        if not run.metrics:
            tell(f"{run.damage or f'{run.path} has no metrics yet'}; it is left out")
    return logged


def common_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """Return the metrics that all runs have logged, in the first run's order.

    Raises:
        ConfigError: there are none, or some runs count environment steps and others updates.
    """
    first, *others = runs
    refuse((not run.metrics, "", run.damage or f"{run.path} has no metrics in its metrics.csv yet") for run in runs)
    if odd := [run for run in others if run.unit != first.unit]:
        said = f"{first.path} counts {step_label(first.unit)}, and {odd[0].path} counts {step_label(odd[0].unit)}"
        raise ConfigError("", f"{said}: there is no common axis")
    common = [name for name in first.metrics if all(name in run.metrics for run in others)]
    if not common:
        other = next(run for run in others if not first.metrics.keys() & run.metrics.keys())
        said = f"{first.path} has {_few(first)}, and {other.path} has {_few(other)}"
        raise ConfigError("", f"the runs have no metric in common: {said}")
    return common


def chosen_metrics(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[str]:
    """Return ``metrics``; without any, evaluations if all runs have several of them, otherwise training episodes.

    Raises:
        ConfigError: see ``common_metrics``; some runs lack a metric.
    """
    common = common_metrics(runs)
    for metric in metrics:
        if metric not in common:
            lacking = [str(run.path) for run in runs if metric not in run.metrics]
            many = "no run" if len(lacking) == len(runs) else f"{len(runs) - len(lacking)} of {len(runs)} runs"
            where = "" if len(lacking) == len(runs) else f", and {lacking[0]} is not among them"
            raise ConfigError("--metric", f"{many} has logged {metric!r}{where}; {unknown(metric, common)}")
    if metrics:
        return [*dict.fromkeys(metrics)]
    often = [name for name in (EVALUATION, TRAINING) if all(_points(run, name) > 1 for run in runs)]
    some = [name for name in (EVALUATION, TRAINING) if name in common]
    if not (often or some):
        raise ConfigError("--metric", f"the runs have no return in common; name another metric: {', '.join(common)}")
    return (often or some)[:1]


def curve(label: str, of: Sequence[RunRecord], metric: str, smooth: int, tell: Callable[[str], None]) -> Curve:
    """Return a metric of runs: on the steps that they logged, or on the common part of different steps.

    Args:
        smooth: average each value with so many values before it, itself included.
        tell: called with a line if a run ends early, because the mean ends there, too.
    """
    runs = [np.stack([run.metrics[metric][0], smoothed(run.metrics[metric][1], smooth)]) for run in of]
    if all(np.array_equal(run[0], runs[0][0]) for run in runs):
        return Curve(label, runs[0][0], np.stack([run[1] for run in runs]))
    first, last = max(run[0, 0] for run in runs), min(run[0, -1] for run in runs)
    if last < 0.9 * max(run[0, -1] for run in runs):
        short = min(zip(runs, of, strict=True), key=lambda pair: pair[0][0, -1])[1]
        tell(f"{label}: {short.path} ({short.state}) ends at {last:,.0f}, and so does the mean of its group")
    steps = np.unique(np.concatenate([run[0] for run in runs]).clip(min(first, last), last))
    if len(steps) > POINTS:
        steps = np.linspace(steps[0], last, POINTS)
    return Curve(label, steps, np.stack([np.interp(steps, *run) for run in runs]))


def drawn(groups: Sequence[Group], metrics: Sequence[str], smooth: int, tell: Callable[[str], None]) -> list[Curve]:
    """Return the curves of metrics of groups, labeled by what there are several of."""
    curves: list[Curve] = []
    for group in groups:
        for metric in metrics:
            names = [group.label] if len(groups) > 1 or len(metrics) == 1 else []
            names += [NAMES.get(metric, metric)] if len(metrics) > 1 else []
            over = 1 if metric.startswith("eval/") else smooth  # an evaluation is a mean over episodes already
            curves.append(curve(", ".join(names), group.runs, metric, over, tell))
    return curves


def title(groups: Sequence[Group]) -> str:
    """Return the environment and the number of runs of each group, if they are the same for all."""
    envs, counts = {group.env for group in groups}, {len(group.runs) for group in groups}
    many = f"{next(iter(counts))} run{'s' * (counts != {1})}" + " each" * (len(groups) > 1)
    return ", ".join([*(envs if len(envs) == 1 else ()), *([many] if len(counts) == 1 else [])])


def axis(runs: Sequence[RunRecord]) -> str:
    """Return the label of the axis of steps."""
    return step_label(runs[0].unit)


def values_axis(metrics: Sequence[str]) -> str:
    """Return the label of the axis of values, with its unit where there is one."""
    if len(metrics) > 1 and {*metrics} <= {EVALUATION, TRAINING}:
        return "return"
    return ", ".join(map(metric_label, metrics))


def compared(words: Sequence[str]) -> tuple[dict[str, float], list[Curve]]:
    """Return horizontal lines and curves of others, from ``LABEL=VALUE`` and ``LABEL=FILE``.

    Raises:
        ConfigError: a word is neither, or a file lacks the columns ``step`` and ``return``.
    """
    levels: dict[str, float] = {}
    others: list[Curve] = []
    for word in words:
        label, _, value = word.rpartition("=")
        level = math.nan
        with suppress(ValueError):
            level = float(value)
        if label and math.isfinite(level):
            levels[label] = level
        else:
            columns, _ = read_metrics(Path(value))
            if not label or "return" not in columns:
                said = f"{word!r} is not LABEL=VALUE, or LABEL=FILE with a CSV file of the columns step and return"
                raise ConfigError("--compare", said)
            steps, returns = columns["return"]
            others.append(Curve(label, steps, returns[None]))
    return levels, others


def thinned(curve: Curve, points: int) -> Curve:
    """Return a curve on at most ``points`` steps."""
    if len(curve.steps) <= points:
        return curve
    steps = np.linspace(curve.steps[0], curve.steps[-1], points)
    return Curve(curve.label, steps, np.stack([np.interp(steps, curve.steps, run) for run in curve.values]))


def smoothed(values: np.ndarray, over: int) -> np.ndarray:
    """Return means of ``values [P]`` over the last ``over`` values up to each, fewer at the beginning."""
    sums, end = np.cumsum(np.insert(values, 0, 0.0)), np.arange(1, len(values) + 1)
    start = np.maximum(end - over, 0)
    return (sums[end] - sums[start]) / (end - start)


def metric_label(metric: str) -> str:
    """Return the label of an axis of a metric, with its unit where there is one."""
    if metric.startswith("time/") and metric not in NAMES:
        return f"{metric} (s)"
    return NAMES.get(metric, metric)


def _points(run: RunRecord, metric: str) -> int:
    return run.metrics[metric].shape[1] if metric in run.metrics else 0


def _few(run: RunRecord) -> str:
    names = [*run.metrics]
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")

"""A report of runs: one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from rlplug.results import curves
from rlplug.results.details import commands, differences, machines, videos
from rlplug.results.groups import Group
from rlplug.results.html import cell, section, table
from rlplug.results.listing import number
from rlplug.results.pairs import paired_differences
from rlplug.results.record import RunRecord
from rlplug.results.scores import Contest, contests, final_scores
from rlplug.results.statistics import improvement, improvement_interval, iqm, iqm_interval

POINTS = 400  # of a curve on the page
FEW = "Bootstrap intervals of fewer than about ten runs are too narrow."
WITH_RUNS = ("eval/", "episode/")  # metrics whose single runs are on the page


@dataclass(frozen=True)
class Report:
    """What a page shows.

    Attributes:
        metric: of the final scores, and the first one that is drawn.
        out: the file of the page, to which links are relative.
    """

    groups: Sequence[Group]
    metric: str
    out: Path

    @property
    def runs(self) -> list[RunRecord]:
        return [run for group in self.groups for run in group.runs]


def page(report: Report, title: str, tell: Callable[[str], None]) -> bytes:
    """Return the page."""
    rounds = contests(report.groups, report.metric)
    sections = [
        _curves(report),
        _final(report, rounds),
        _improvements(rounds),
        _profiles(report, rounds),
        paired_differences(report.groups, report.metric),
        differences(report.groups),
        videos(report.runs, report.out.parent),
        machines(report.runs),
        commands(report.groups),
    ]
    many = f"{len(report.runs)} runs in {len(report.groups)} groups; a group's runs differ by their seed"
    made = f"{many}. Written by rlplug {metadata.version('rlplug')} on {datetime.now():%Y-%m-%d %H:%M}."
    own = files("rlplug.results")
    text = Template(own.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=escape(made),
        css=own.joinpath("page.css").read_text(encoding="utf-8"),
        js=own.joinpath("page.js").read_text(encoding="utf-8"),
        sections="\n".join(filter(None, sections)),
        data=json.dumps(_data(report, rounds, tell)).replace("<", "\\u003c"),
    )
    return text.encode()


def _data(report: Report, rounds: Sequence[Contest], tell: Callable[[str], None]) -> dict[str, Any]:
    """Return what the page's script draws, as plain values."""
    names = dict.fromkeys([report.metric, *(name for run in report.runs for name in run.metrics)])
    lines = {
        name: [*_series(report.groups, name, tell if name == report.metric else lambda line: None)] for name in names
    }
    profiles = []
    for contest in rounds:
        thresholds, found = contest.profiles()
        series = [
            _line(of[0], thresholds, share, band) for of, (share, band) in zip(contest.members, found, strict=True)
        ]
        scale = "scaled score" if len(contest.members[0]) > 1 else curves.metric_label(report.metric)
        profiles.append({"x": f"{scale} (threshold)", "y": "share of runs above it", "series": series})
    return {
        "groups": [group.label for group in report.groups],
        "envs": [group.env for group in report.groups],
        "x": curves.axis(report.runs),
        "metrics": {name: {"label": curves.metric_label(name), "series": of} for name, of in lines.items() if of},
        "profiles": profiles,
    }


def _series(groups: Sequence[Group], metric: str, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the curves of the groups of which all runs have a metric."""
    for i, group in enumerate(groups):
        if all(metric in run.metrics for run in group.runs):
            curve = curves.thinned(curves.curve(group.label, group.runs, metric, 1, tell), POINTS)
            runs = curve.values if metric.startswith(WITH_RUNS) and len(group.runs) > 1 else None
            yield _line(i, curve.steps, curve.mean, curve.band, runs)


def _line(
    group: int, x: np.ndarray, mean: np.ndarray, band: np.ndarray | None, runs: np.ndarray | None = None
) -> dict[str, Any]:
    line: dict[str, Any] = {"group": group, "x": _plain(x), "mean": _plain(mean)}
    if band is not None:
        line |= {"low": _plain(band[0]), "high": _plain(band[1])}
    return line if runs is None else line | {"runs": [*map(_plain, runs)]}


def _plain(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _curves(report: Report) -> str:
    metrics = dict.fromkeys([report.metric, *(name for run in report.runs for name in run.metrics)])
    choices = "".join(f"<option>{escape(name)}</option>" for name in metrics)
    envs = dict.fromkeys(group.env for group in report.groups)
    charts = "".join(
        f'<figure><h3>{escape(env)}</h3><div class="chart" data-curves="{escape(env)}"></div></figure>' for env in envs
    )
    about = "Lines are means over the runs of a group, bands their 95 % bootstrap intervals."
    return section(
        "Curves",
        f'<div class="controls"><label>metric <select id="metric">{choices}</select></label>'
        '<label><input type="checkbox" id="each"> each run</label></div>'
        f'<div class="controls legend"></div><div class="charts">{charts}</div>'
        "<noscript><p>The curves need JavaScript; the tables below do not.</p></noscript>",
        about,
    )


def _final(report: Report, rounds: Sequence[Contest]) -> str:
    """Return the table of final scores."""
    left = [run for run in report.runs if run.state != "finished"]
    about = (
        f"The {curves.metric_label(report.metric)} at the end of each finished run. IQM is the interquartile mean, the "
    )
    about += f"mean of the middle half of the scores; its interval is a stratified bootstrap over the runs. {FEW}"
    if left:
        states = ", ".join(f"{run.path.name} ({run.state})" for run in left)
        about += f" {len(left)} of {len(report.runs)} runs have not finished, and are left out: {states}."
    tables: list[str] = []
    for contest in rounds:
        pooled = [np.concatenate(scores) for scores in contest.scores]
        low, high = min(x.min() for x in pooled), max(x.max() for x in pooled)
        rows = []
        for of, method, scores, x in zip(contest.members, contest.methods, contest.scores, pooled, strict=True):
            middle, ends = iqm(scores), iqm_interval(scores)
            figures = [
                number(middle),
                f"{number(ends[0])} to {number(ends[1])}",
                *map(number, (x.mean(), x.min(), x.max())),
            ]
            whisker = _whisker(ends, middle, low, high)
            rows.append([_keyed(of[0], method), *(cell(figure, True) for figure in (str(len(x)), *figures)), whisker])
        head = ("", "runs", "IQM", "95 % interval", "mean", "worst", "best", "")
        scale = ", each scaled by its worst and best run" if len(contest.members[0]) > 1 else ""
        tables.append(table(head, rows, contest.name + scale, numbers=range(1, 7)))
    absent = [group.label for group in report.groups if not len(final_scores(group, report.metric))]
    if absent:
        tables.append(f"<p>No run of {escape(', '.join(absent))} has finished.</p>")
    return section("Final scores", "".join(tables), about)


def _improvements(rounds: Sequence[Contest]) -> str:
    """Return a table for each contest: the probability that a run of the row scores higher than one of the column."""
    tables: list[str] = []
    for contest in rounds:
        if len(contest.methods) < 2:
            continue
        rows = []
        for i, (of, method) in enumerate(zip(contest.members, contest.methods, strict=True)):
            cells = [_keyed(of[0], method)]
            for j, other in enumerate(contest.scores):
                if i == j:
                    cells.append(cell("", True))
                    continue
                low, high = improvement_interval(contest.scores[i], other)
                cells.append(cell(f"{improvement(contest.scores[i], other):.2f} [{low:.2f}, {high:.2f}]", True))
            rows.append(cells)
        tables.append(table(("", *contest.methods), rows, contest.name, numbers=range(1, len(rows) + 1)))
    about = "The probability that a run of the row scores higher than one of the column, with its 95 % interval. "
    about += f"Ties count half. {FEW}"
    return section("Probability of improvement", "".join(tables), about) if tables else ""


def _profiles(report: Report, rounds: Sequence[Contest]) -> str:
    charts = "".join(
        f'<figure><h3>{escape(contest.name)}</h3><div class="chart" data-profile="{i}"></div></figure>'
        for i, contest in enumerate(rounds)
    )
    about = "The share of finished runs whose final score is above a threshold; a curve above another one is better."
    legend = '<div class="controls legend"></div>'
    return section("Performance profiles", f'{legend}<div class="charts">{charts}</div>', about) if rounds else ""


def _keyed(group: int, label: str) -> str:
    """Return a cell with a group's line style."""
    return f'<th scope="row" data-key="{group}"><span></span>{escape(label)}</th>'


def _whisker(ends: tuple[float, float], middle: float, low: float, high: float) -> str:
    """Return a cell with an interval and its middle, drawn between the worst and the best score of a table."""
    x = [5 + 150 * ((value - low) / ((high - low) or 1.0)) for value in (*ends, middle)]
    return (
        '<td><svg class="whisker" width="160" height="14" viewBox="0 0 160 14" aria-hidden="true">'
        f'<path d="M{x[0]:.1f} 7H{x[1]:.1f}M{x[0]:.1f} 3V11M{x[1]:.1f} 3V11" stroke="currentColor" stroke-width="1.5"/>'
        f'<path d="M{x[2]:.1f} 7h0" stroke="currentColor" stroke-width="7" stroke-linecap="round"/></svg></td>'
    )

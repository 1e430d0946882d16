"""Picture of a population: the scores of all members, and whose checkpoint each continued from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlplug.results import plot

FILE = "lineage.svg"


class Member(Protocol):
    folder: str
    parent: str | None
    score: float
    settings: dict[str, str]


def draw(folder: Path, rounds: Sequence[Sequence[Member]], ends: Sequence[int], unit: str) -> None:
    """Draw ``lineage.svg`` and ``lineage.png``, one panel for the scores and one for each searched number.

    Args:
        ends: steps at the end of every round.
        unit: unit of the steps.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    numbers = [key for key in rounds[0][0].settings if all(_number(one.settings[key]) for row in rounds for one in row)]
    with matplotlib.rc_context(plot.STYLE):
        panels: list[tuple[str, Any]] = [("eval/return_mean", lambda one: one.score)]
        panels += [(key, lambda one, key=key: float(one.settings[key])) for key in numbers]
        figure = Figure((2 * plot.WIDTH, 0.7 * plot.HEIGHT * len(panels)), layout="constrained")
        for axes, (label, value) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            _panel(axes, rounds, ends, value)
            values = [value(one) for row in rounds for one in row]
            if label != "eval/return_mean" and min(values) > 0 and max(values) / min(values) > 10:
                axes.set_yscale("log")
            axes.set(ylabel=label)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=f"{unit}s; dashed: a copy of another member")
    plot.save(figure, [folder / FILE, folder / FILE.replace("svg", "png")])


def _panel(axes: Any, rounds: Sequence[Sequence[Member]], ends: Sequence[int], value: Any) -> None:
    """Draw a line from every member to its parent, dashed where it copied another member."""
    for number, row in enumerate(rounds):
        parents = {one.folder: (i, one) for i, one in enumerate(rounds[number - 1])} if number else {}
        for i, one in enumerate(row):
            if math.isnan(value(one)):
                continue
            color = plot.COLORS[i % len(plot.COLORS)]
            axes.plot(ends[number], value(one), color=color, marker="o", ms=2.5)
            if one.parent in parents and not math.isnan(value(parents[one.parent][1])):
                of, parent = parents[one.parent]
                line = "-" if of == i else (0, (3, 2))
                axes.plot(
                    ends[number - 1 : number + 1], [value(parent), value(one)], color=color, linestyle=line, lw=0.9
                )


def _number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False

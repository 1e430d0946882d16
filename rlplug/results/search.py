"""Pictures of a hyperparameter search: the values of its trials, and the importance of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplug.results import plot

HISTORY, IMPORTANCE = "history.svg", "importance.svg"


def draw_history(folder: Path, trials: Sequence[tuple[int, float | None, str]], maximize: bool) -> Path:
    """Draw ``history.svg`` and ``history.png``: the value of every trial, and the best so far.

    Args:
        trials: number, value and state of each: ``COMPLETE``, ``PRUNED`` (its last value before) or ``FAIL``.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = [(number, value, state) for number, value, state in trials if value is not None and math.isfinite(value)]
    with matplotlib.rc_context(plot.STYLE):
        figure = Figure((plot.WIDTH, plot.HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        for state, label, marker, color in (
            ("COMPLETE", "finished", "o", plot.COLORS[0]),
            ("PRUNED", "pruned", "x", plot.COLORS[1]),
        ):
            points = [(number, value) for number, value, of in known if of == state]
            if points:
                axes.plot(*zip(*points, strict=True), marker, ms=3, color=color, label=label)
        best: list[tuple[int, float]] = []
        for number, value, state in known:
            if state == "COMPLETE":
                best.append((number, (max if maximize else min)([value, *(old for _, old in best[-1:])])))
        if best:
            axes.step(*zip(*best, strict=True), where="post", color=plot.COLORS[0], lw=0.9, label="best so far")
        axes.set(xlabel="trial", ylabel="eval/return_mean")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
    plot.save(figure, [folder / HISTORY, folder / HISTORY.replace("svg", "png")])
    return folder / HISTORY


def draw_importance(folder: Path, shares: Mapping[str, float]) -> Path:
    """Draw ``importance.svg`` and ``importance.png``: a bar for each setting, the most important one on top."""
    import matplotlib
    from matplotlib.figure import Figure

    order = sorted(shares, key=lambda key: shares[key])
    with matplotlib.rc_context(plot.STYLE):
        figure = Figure((plot.WIDTH, 0.6 + 0.25 * len(order)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(order, [shares[key] for key in order], color=plot.COLORS[0])
        axes.set(xlabel="importance", xlim=(0, 1))
    plot.save(figure, [folder / IMPORTANCE, folder / IMPORTANCE.replace("svg", "png")])
    return folder / IMPORTANCE

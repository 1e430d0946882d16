"""Pictures of curves, drawn by matplotlib: with line styles that tell curves apart in grey, at half a column."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplug.results.curves import Curve
from rlplug.results.output import require_file, write
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#8c4a87", "#5c4a00", "#56b4e9", "#000000")  # told apart by the color-blind
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 2, 2, 2, 2)))
WIDTH, HEIGHT = 3.3, 2.3  # inches: one of two columns
CHARACTER = 0.06  # inches of a letter, about
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "rlplug",  # the same curves are the same file
}


def require_matplotlib() -> None:
    """Raise ``ConfigError`` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("", "plots are drawn by matplotlib: pip install 'rlplug[plots]'") from None


def draw(
    curves: Sequence[Curve],
    x: str,
    y: str,
    title: str = "",
    width: float = WIDTH,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """Draw the mean of each curve, and its band.

    Args:
        x: the label of the steps.
        y: the label of the values.
        width: in inches.
        levels: horizontal lines with labels, such as published results.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with matplotlib.rc_context(STYLE):
        labels = [_wrapped(label, width) for label in (*(curve.label for curve in curves), *(levels or {}))]
        columns = _columns(labels, width)
        lines = -(-sum(1 + label.count("\n") for label in labels) // columns)
        figure = Figure((width, HEIGHT * (1 + 0.3 * (width > 1.5 * WIDTH)) + 0.14 * lines), layout="constrained")
        axes = figure.add_subplot()
        for i, curve in enumerate(curves):
            color, line = COLORS[i % len(COLORS)], LINES[i % len(LINES)]
            marker = "o" if len(curve.steps) == 1 else ""
            axes.plot(curve.steps, curve.mean, color=color, linestyle=line, marker=marker, ms=3, label=labels[i])
            if (band := curve.band) is not None:
                axes.fill_between(curve.steps, *band, color=color, alpha=0.14, linewidth=0)
                for edge in band:  # which band is whose shows in grey, too
                    axes.plot(curve.steps, edge, color=color, linestyle=line, linewidth=0.4, alpha=0.7)
        for label, level, i in zip(labels[len(curves) :], (levels or {}).values(), count(1), strict=False):
            axes.axhline(level, color="0.35", linewidth=0.8, linestyle=LINES[i % len(LINES)], label=label)
        axes.set(xlabel=x, ylabel=y, title=_wrapped(title, width))
        axes.grid(axis="y", color="0.9", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params(axis="x", nbins=6)
        axes.locator_params(axis="y", nbins=6)
        figure.legend(loc="outside lower center", ncols=columns)
    return figure


def outputs(out: str) -> list[Path]:
    """Return the files of a picture: a PNG and an SVG, or the one that ``out`` names by its suffix.

    Raises:
        ConfigError: the suffix is of no format, or the folder does not exist.
    """
    path = Path(out)
    paths = [path] if path.suffix else [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    if path.suffix.lower().removeprefix(".") not in ("", *FORMATS):
        raise ConfigError("--out", f"{path} should end in one of {', '.join('.' + name for name in FORMATS)}")
    for file in paths:
        require_file(file)
    return paths


def save(figure: Figure, paths: Sequence[Path]) -> None:
    """Write a figure to files, in the format of each suffix.

    Raises:
        ConfigError: see ``write``.
    """
    import matplotlib

    pictures: list[tuple[Path, bytes]] = []
    for path in paths:
        kind, file = path.suffix.lower().removeprefix("."), io.BytesIO()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with matplotlib.rc_context(STYLE):
            figure.savefig(file, format=kind, dpi=300, metadata=metadata)
        pictures.append((path, file.getvalue()))
    for path, data in pictures:
        write(path, data)


def _wrapped(text: str, width: float) -> str:
    """Break a text into lines that fit into a picture of so many inches."""
    return textwrap.fill(text, max(10, int((width - 0.5) / CHARACTER)))


def _columns(labels: Sequence[str], width: float) -> int:
    """Return in how many columns a legend stands, by the longest line of its labels."""
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    return int(np.clip(width / (CHARACTER * longest + 0.5), 1, 4))

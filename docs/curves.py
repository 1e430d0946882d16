"""Draw the learning curves of several runs (seeds) of one line as an SVG.

    python -m rlplug -m algo=ppo env=cartpole seed=1,2,3 eval.every=2_000 hydra.sweep.dir=runs/curves/ppo_cartpole
    python docs/curves.py ppo_cartpole runs/curves/ppo_cartpole/seed=*

The arguments are a name and run folders; the picture is ``docs/img/<name>.svg``. It shows the mean over the runs and
the range from the worst to the best one, of training's episodes and of the evaluations. Returns that others have
published are dashed lines: ``--published 'CleanRL, 10M steps=20.4'``; a curve of theirs is a file of ``step,return``:
``--beside 'Stable-Baselines3=benchmarks/results/pong_sb3.csv'``.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44  # margins
SERIES = {"episode/return": ("#7a869a", "training episodes"), "eval/return_mean": ("#0b62d6", "evaluation")}
OTHERS = "#b3541e"
POINTS = 100  # of a curve

Curves = dict[str, tuple[np.ndarray, np.ndarray]]


def read(folders: Sequence[Path], smooth: int = 1) -> Curves:
    """For each metric its environment steps ``[P]`` and its value in each run ``[runs, P]``.

    Args:
        smooth: training's episodes are means over so many rows before.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in SERIES}
    for folder in folders:
        with (folder / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for name, runs in found.items():
            curve = np.array([(float(row["step"]), float(row[name])) for row in rows if row.get(name)]).T
            runs.append(_smoothed(curve, smooth) if name == "episode/return" else curve)
    return {name: _together(runs) for name, runs in found.items()}


def _smoothed(curve: np.ndarray, rows: int) -> np.ndarray:
    """Means of ``curve [2, P]`` over the last rows up to each, as many as there are at the beginning."""
    sums, many = np.cumsum(np.insert(curve[1], 0, 0.0)), np.arange(1, curve.shape[1] + 1)
    first = np.maximum(many - rows, 0)
    return np.stack([curve[0], (sums[many] - sums[first]) / (many - first)])


def _together(runs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Runs on the steps that all of them reach."""
    steps = np.linspace(max(run[0, 0] for run in runs), min(run[0, -1] for run in runs), POINTS)
    return steps, np.stack([np.interp(steps, *run) for run in runs])


def ticks(low: float, high: float, most: int = 6) -> np.ndarray:
    """Round numbers in [low, high], at most ``most`` of them."""
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10, 20) if (high - low) / (m * power) <= most - 1)
    return np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step


def draw(
    title: str,
    curves: Curves,
    published: Mapping[str, float],
    beside: Mapping[str, np.ndarray],
    series: Mapping[str, tuple[str, str]] = SERIES,
    axis: str = "environment steps",
) -> str:
    """The picture as SVG, with the returns that others have published, and curves ``[2, P]`` of theirs.

    Args:
        series: color and label of each of ``curves``.
        axis: what stands below.
    """
    steps = np.concatenate([x for x, _ in curves.values()] + [x for x, _ in beside.values()])
    theirs = [list(published.values()), *(y for _, y in beside.values())]
    values = np.concatenate([*theirs, *(y.ravel() for _, y in curves.values())])
    low, high, last = values.min(), values.max(), steps.max()
    pad = 0.05 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def place(x: np.ndarray, y: np.ndarray) -> str:
        across = LEFT + np.asarray(x) / last * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - np.asarray(y)) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return " ".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))

    def grid() -> Iterator[str]:
        for y in ticks(low, high):
            yield f'<polyline points="{place([0, last], [y, y])}" stroke="#e3e6ea"/>'
            yield _text(LEFT - 6, float(place([0], [y]).split(",")[1]) + 4, f"{y:,g}", "end")
        for x in ticks(0, last):
            yield _text(float(place([x], [low]).split(",")[0]), HEIGHT - BOTTOM + 16, f"{x:,.10g}", "middle")

    def lines() -> Iterator[str]:
        for i, (name, (x, y)) in enumerate(curves.items()):
            color, label = series[name]
            band = place(np.concatenate((x, x[::-1])), np.concatenate((y.max(0), y.min(0)[::-1])))
            yield f'<polygon points="{band}" fill="{color}" fill-opacity="0.18" stroke="none"/>'
            yield f'<polyline points="{place(x, y.mean(0))}" stroke="{color}" stroke-width="2"/>'
            left = WIDTH - 10 - 145 * (len(curves) - i)
            yield f'<rect x="{left}" y="12" width="14" height="4" fill="{color}"/>'
            yield _text(left + 20, 18, label)

    def others() -> Iterator[str]:
        for i, (label, y) in enumerate(published.items()):
            line = place([0, last], [y, y])
            yield f'<polyline points="{line}" stroke="{OTHERS}" stroke-dasharray="6 4"/>'
            down = float(line.split(",")[-1]) + (14 if i % 2 else -5)  # above its line, the next one below
            yield _text(LEFT + 4, down, f"{label}: {y:,g}")
        for i, (label, (x, y)) in enumerate(beside.items()):
            yield f'<polyline points="{place(x, y)}" stroke="{OTHERS}" stroke-width="2"/>'
            yield f'<rect x="{WIDTH - 300}" y="{HEIGHT - BOTTOM - 20 - 16 * i}" width="14" height="4" fill="{OTHERS}"/>'
            yield _text(WIDTH - 280, HEIGHT - BOTTOM - 14 - 16 * i, label)

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="sans-serif" font-size="12" fill="none">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *grid(),
            *lines(),
            *others(),
            _text(LEFT, 18, title),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, axis, "middle"),
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f">{escape(text)}</text>'


def _labelled(text: str) -> tuple[str, float]:
    label, _, value = text.rpartition("=")
    try:
        return label, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=RETURN, as in 'CleanRL, 10M steps=20.4'") from None


def _curve(text: str) -> tuple[str, np.ndarray]:
    label, _, path = text.rpartition("=")
    try:
        with open(path, encoding="utf-8") as file:
            return label, np.array([(float(row["step"]), float(row["return"])) for row in csv.DictReader(file)]).T
    except (OSError, KeyError, ValueError):
        said = f"{text!r} is not LABEL=FILE, where the file has the columns step and return"
        raise argparse.ArgumentTypeError(said) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the picture: docs/img/<name>.svg")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--published", action="append", default=[], type=_labelled, metavar="LABEL=RETURN")
    parser.add_argument("--beside", action="append", default=[], type=_curve, metavar="LABEL=FILE")
    parser.add_argument("--smooth", type=int, default=1, metavar="ROWS", help="of metrics, for training's episodes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img")
    args = parser.parse_args()
    folders = [folder for folder in args.folders if (folder / "metrics.csv").exists()]
    if not folders:
        parser.error("none of the folders holds a metrics.csv")
    args.out.mkdir(parents=True, exist_ok=True)
    title = f"{args.name}: return, {len(folders)} run{'s' if len(folders) > 1 else ''}"
    path = args.out / f"{args.name}.svg"
    path.write_text(draw(title, read(folders, args.smooth), dict(args.published), dict(args.beside)), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

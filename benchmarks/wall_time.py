"""PPO and APPO on HalfCheetah-v5 at equal wall time: the plain lines, APPO with two Ray actors.

    python benchmarks/wall_time.py                      # seed 1: a quarter of an hour
    python benchmarks/wall_time.py --seeds 1,2,3 --keep runs/wall_time

One run at a time on the whole machine. Evaluations are not counted as time. The curves end where the first of the runs
ends. Results go to ``results/wall_time.json``, a table to ``docs/appo.md``, the curves to
``docs/img/appo_halfcheetah.svg``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
from pathlib import Path

import numpy as np
from shared import draw, trained, write_table

from rlplug.results.curves import Curve

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RESULTS, PAGE, PICTURE = HERE / "results" / "wall_time.json", DOCS / "appo.md", DOCS / "img" / "appo_halfcheetah.svg"
LINES = {
    "PPO": ("algo=ppo", "hardware=cpu"),
    "APPO": ("algo=appo", "hardware=cpu", "hardware.actors.count=2", "hardware.actors.num_cpus=0.5"),
}
ALL = ("env=halfcheetah", "logger=[]", "eval.every=100_000", "log.every=10_000")
POINTS = 100  # of a curve
WINDOW = 0.5  # minutes over which returns are averaged


def run(folder: Path, name: str, seed: str) -> Path:
    """Make one run; return its folder."""
    return trained(folder / f"{name}-s{seed}", [*LINES[name], *ALL, f"seed={seed}"])


def curve(folder: Path) -> np.ndarray:
    """Return minutes without evaluations, and the mean return of training episodes over ``WINDOW``, ``[2, P]``."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["episode/return"]]
    minutes = np.array([(float(row["time/wall_s"]) - float(row["time/evaluate"] or 0.0)) / 60 for row in rows])
    returns = np.array([float(row["episode/return"]) for row in rows])
    return np.stack([minutes, [returns[(minutes > m - WINDOW) & (minutes <= m)].mean() for m in minutes]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    seeds = args.seeds.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        folders = {(name, seed): run(folder, name, seed) for seed in seeds for name in LINES}
        found = {key: curve(one) for key, one in folders.items()}
        summaries = {key: json.loads((one / "summary.json").read_text()) for key, one in folders.items()}
    minutes = np.linspace(max(x[0] for x, _ in found.values()), min(x[-1] for x, _ in found.values()), POINTS)
    drawn = {name: np.stack([np.interp(minutes, *found[name, seed]) for seed in seeds]) for name in LINES}
    end = float(minutes[-1])
    marks = [*(mark for mark in range(1, math.ceil(end)) if end - mark > 0.1), end]
    results = {
        name: {
            "return": {f"{mark:.3g}": float(np.interp(mark, minutes, y.mean(0))) for mark in marks},
            "env_steps": int(statistics.mean(summaries[name, seed]["env_steps"] for seed in seeds)),
            "minutes": statistics.mean(float(found[name, seed][0, -1]) for seed in seeds),
            "scores": {seed: summaries[name, seed]["eval/return_mean"] for seed in seeds},
        }
        for name, y in drawn.items()
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| | " + " | ".join(f"{mark:.3g} min" for mark in marks) + " | steps in all | evaluation at the end |"]
    lines += ["|---" * (len(marks) + 3) + "|"]
    for name, result in results.items():
        each = " | ".join(f"{score:,.0f}" for score in result["return"].values())
        end = ", ".join(f"{score:,.0f}" for score in result["scores"].values())
        lines += [f"| {name} | {each} | {result['env_steps']:,} in {result['minutes']:.1f} min | {end} |"]
    write_table(PAGE, "wall time", lines)
    curves = [Curve(name, minutes, y) for name, y in drawn.items()]
    draw(PICTURE, curves, "time without evaluations (min)", "training return", "HalfCheetah-v5")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()

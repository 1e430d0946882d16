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
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
sys.path.insert(0, str(DOCS))
import curves  # noqa: E402

RESULTS, PAGE, PICTURE = HERE / "results" / "wall_time.json", DOCS / "appo.md", DOCS / "img" / "appo_halfcheetah.svg"
TABLE = re.compile(r"(<!-- wall time -->\n).*?(<!-- end -->)", re.DOTALL)
LINES = {
    "PPO": ("algo=ppo", "hardware=cpu"),
    "APPO": ("algo=appo", "hardware=cpu", "hardware.actors.count=2", "hardware.actors.num_cpus=0.5"),
}
ALL = ("env=halfcheetah", "logger=[csv]", "eval.every=100_000", "log.every=10_000")
COLORS = {"PPO": "#0b62d6", "APPO": "#b3541e"}
EPISODES = 20  # rows of metrics of which returns are means


def run(folder: Path, name: str, seed: str) -> Path:
    """Make one run in a process of its own; return its folder."""
    target = folder / f"{name}-s{seed}"
    if not (target / "summary.json").exists():
        words = [*LINES[name], *ALL, f"seed={seed}", f"hydra.run.dir={target}"]
        done = subprocess.run([sys.executable, "-m", "rlplug", *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    return target


def curve(folder: Path) -> np.ndarray:
    """Return minutes without evaluations, and the mean return of the last training episodes, ``[2, P]``."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["episode/return"] and row["time/wall_s"]]
    minutes = [(float(row["time/wall_s"]) - float(row["time/evaluate"] or 0.0)) / 60 for row in rows]
    returns = [float(row["episode/return"]) for row in rows]
    return np.array([minutes, [statistics.mean(returns[max(0, i - EPISODES) : i + 1]) for i in range(len(rows))]])


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
    minutes = np.linspace(max(x[0] for x, _ in found.values()), min(x[-1] for x, _ in found.values()), curves.POINTS)
    drawn = {name: (minutes, np.stack([np.interp(minutes, *found[name, seed]) for seed in seeds])) for name in LINES}
    marks = [*range(1, math.ceil(minutes[-1])), float(minutes[-1])]
    results = {
        name: {
            "return": {f"{mark:.3g}": float(np.interp(mark, minutes, y.mean(0))) for mark in marks},
            "env_steps": int(statistics.mean(summaries[name, seed]["env_steps"] for seed in seeds)),
            "minutes": statistics.mean(float(found[name, seed][0, -1]) for seed in seeds),
            "scores": {seed: summaries[name, seed]["eval/return_mean"] for seed in seeds},
        }
        for name, (_, y) in drawn.items()
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| | " + " | ".join(f"{mark:.3g} min" for mark in marks) + " | steps in all | evaluation at the end |"]
    lines += ["|---" * (len(marks) + 3) + "|"]
    for name, result in results.items():
        each = " | ".join(f"{score:,.0f}" for score in result["return"].values())
        end = ", ".join(f"{score:,.0f}" for score in result["scores"].values())
        lines += [f"| {name} | {each} | {result['env_steps']:,} in {result['minutes']:.1f} min | {end} |"]
    page, table = PAGE.read_text(encoding="utf-8"), "\n".join(lines)
    PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page), encoding="utf-8")
    series = {name: (color, name) for name, color in COLORS.items()}
    picture = curves.draw("HalfCheetah-v5: return while training", drawn, {}, {}, series, axis="minutes of training")
    PICTURE.write_text(picture, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()

"""Draw the regret of LinUCB, Thompson sampling and epsilon-greedy on env=linear_bandit, whose optimum is known.

    python benchmarks/bandits.py                        # three seeds of each: some two minutes
    python benchmarks/bandits.py --seeds 1 --keep runs/bandits

Every run is the plain line, ``python -m rlplug algo=<name> env=linear_bandit``, one after another. The regret of a
round is the mean reward of its best arm less that of the arm that was taken; no noise is in it. Results go to
``results/bandits.json`` and ``docs/bandits.md``, the picture to ``docs/img/bandits.svg``.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from shared import draw, trained, write_table

from rlplug.config import compose
from rlplug.context import EnvShard, RunContext
from rlplug.results.curves import Curve
from rlplug.types import EnvSpec

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RESULTS, PAGE, PICTURE = HERE / "results" / "bandits.json", DOCS / "bandits.md", DOCS / "img" / "bandits.svg"
ALGOS = ("linucb", "lints", "lingreedy")
EVERY = 100  # rounds between two points
MARKS = (1_000, 5_000, 10_000)  # rounds
LAST = 1_000  # rounds over which the regret a round is averaged at the end


def run(folder: Path, algo: str, seed: str) -> Path:
    """Make one run; return its folder."""
    words = [f"algo={algo}", "env=linear_bandit", f"seed={seed}", f"log.every={EVERY}", "logger=[]", "eval.every=0"]
    return trained(folder / f"{algo}-s{seed}", words)


def regret(folder: Path) -> np.ndarray:
    """Return rounds and the regret of all rounds up to there, ``[2, P]``.

    ``train/regret`` is the mean over the rounds since the row before, so the sum is exact.
    """
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/regret")]
    steps = np.array([float(row["step"]) for row in rows])
    means = np.array([float(row["train/regret"]) for row in rows])
    return np.stack([steps, np.cumsum(np.diff(steps, prepend=0.0) * means)])


def world(rounds: int = 200_000) -> dict[str, float]:
    """Return what a round of the world is worth: by the best arm, and by one drawn uniformly; both are means."""
    ctx = RunContext(spec=EnvSpec({})).derive(shard=EnvShard("eval", rounds, range(rounds)))
    expected = compose(["env=linear_bandit"]).env.build(ctx).reset(range(rounds))["expected_reward"]
    return {"best": float(expected.max(1).mean()), "uniform": float(expected.mean())}


def table(results: dict[str, Any]) -> list[str]:
    """Return the regret at ``MARKS``, and a round at the end."""
    heads = [f"after {mark:,}" for mark in MARKS]
    lines = [f"| | {' | '.join(heads)} | a round of the last {LAST:,} | greedily, at the end |", "|---" * 6 + "|"]
    for algo in ALGOS:
        found = [*results[algo].values()]
        cells = [_span([one[head] for one in found], 1) for head in heads]
        cells += [_span([one[key] for one in found], 4) for key in ("last", "greedy")]
        lines.append(f"| `algo={algo}` | {' | '.join(cells)} |")
    of = results["world"]
    lost = of["best"] - of["uniform"]
    cells = [f"{mark * lost:,.0f}" for mark in MARKS]
    lines.append(f"| arms drawn uniformly | {' | '.join(cells)} | {lost:.4f} | |")
    return lines


def _span(values: list[float], digits: int) -> str:
    return f"**{np.mean(values):.{digits}f}** ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    results: dict[str, Any] = {"world": world()}
    drawn: list[Curve] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        for algo in ALGOS:
            folders = {seed: run(folder, algo, seed) for seed in args.seeds.split(",")}
            found = {seed: regret(one) for seed, one in folders.items()}
            results[algo] = {}
            for seed, (steps, total) in found.items():
                at = {f"after {mark:,}": float(np.interp(mark, steps, total)) for mark in MARKS}
                last = float(total[-1] - np.interp(steps[-1] - LAST, steps, total)) / LAST
                summary = json.loads((folders[seed] / "summary.json").read_text())
                results[algo][seed] = at | {"last": last, "greedy": summary["eval/regret"]}
            print(f"{algo}: {results[algo]}", flush=True)
            drawn.append(Curve(algo, next(iter(found.values()))[0], np.stack([total for _, total in found.values()])))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_table(PAGE, "regret", table(results))
    draw(PICTURE, drawn, "rounds", "regret (sum of rewards)", "linear_bandit")


if __name__ == "__main__":
    main()

"""Learn from data of older and older policies, with V-trace and without: IMPALA on CartPole-v1, in one process.

    python benchmarks/staleness.py                      # three seeds of four settings: some five minutes
    python benchmarks/staleness.py --seeds 1 --keep runs/staleness

In one process a lag is exact: with ``loop.in_flight=9`` and an update a round, every segment was played with the
weights of eight updates ago. ``algo.vtrace=false`` takes it as if the present policy had acted. The step size is a
large one, so that eight updates make another policy. Results go to ``results/staleness.json``, the final evaluations to
``docs/impala.md``, and the curves of training with a lag to ``docs/img/staleness.svg``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import draw, trained, write_table

from rlplug.results.curves import Curve, curve
from rlplug.results.record import read

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RESULTS, PAGE, PICTURE = HERE / "results" / "staleness.json", DOCS / "impala.md", DOCS / "img" / "staleness.svg"
LAG = 8
STEPS = 150_000
LINE = (
    *("algo=impala", "env=cartpole", "tuned=none", "hardware=cpu", "logger=[]", "eval.every=0", "log.every=2_000"),
    *("rollout_fragment_length=32", "train_batch_size=256", "preprocess.scale_reward=0.02", f"total_steps={STEPS}"),
    *(f"algo.lr=[[0,2.0e-3],[{STEPS},0.0]]", "algo.lambda_=0.95", "algo.grad_clip=0.5"),
)
CORRECTED = {"V-trace": "algo.vtrace=true", "uncorrected": "algo.vtrace=false"}


def run(folder: Path, name: str, lag: int, seed: str) -> Path:
    """Make one run; return its folder."""
    words = [*LINE, CORRECTED[name], f"loop.in_flight={lag + 1}", f"seed={seed}"]
    return trained(folder / f"{name}-lag{lag}-s{seed}", words)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the final evaluations as a table."""
    lines = ["| | lag | mean | seeds |", "|---|---|---|---|"]
    for result in sorted(results.values(), key=lambda result: result["lag"]):
        scores = result["scores"]
        each = " ".join(f"{seed}: {score:.1f}" for seed, score in scores.items())
        lines.append(f"| {result['name']} | {result['lag']} | **{statistics.mean(scores.values()):.1f}** | {each} |")
    return lines


def show(results: dict[str, dict[str, Any]], drawn: Sequence[Curve]) -> None:
    """Write what is known: the results, the table, and the picture of the runs with a lag."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_table(PAGE, "staleness", table(results))
    draw(PICTURE, drawn, "environment steps", "training return", f"CartPole-v1 with a lag of {LAG} updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    drawn: list[Curve] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        for lag in (LAG, 0):
            for name in CORRECTED:
                folders = {seed: run(folder, name, lag, seed) for seed in args.seeds.split(",")}
                summaries = {seed: json.loads((one / "summary.json").read_text()) for seed, one in folders.items()}
                scores = {seed: summary["eval/return_mean"] for seed, summary in summaries.items()}
                results[f"{name}, lag {lag}"] = {"name": name, "lag": lag, "scores": scores}
                print(f"{name}, lag {lag}: {scores}", flush=True)
                if lag:
                    drawn.append(curve(name, [read(one) for one in folders.values()], "episode/return", 3, print))
            show(results, drawn)


if __name__ == "__main__":
    main()

"""Prove that algorithms learn: final evaluations over several seeds, against the number to reach.

    python benchmarks/learning.py                    # everything below
    python benchmarks/learning.py ppo_cartpole       # one experiment
    python benchmarks/learning.py --seeds 1,2,3 --jobs 2 sac_pendulum

An experiment is a file of ``conf/experiment``. The command exits with 1 if a mean falls short.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TO_REACH = {  # mean over seeds of the final evaluation: 20 episodes, deterministic
    "ppo_cartpole": 475.0,
    "ppo_pendulum": -250.0,
    "sac_pendulum": -180.0,
    "sac_mountaincar_continuous": 90.0,
    "reinforce_cartpole": 450.0,
}


def run(experiment: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own.

    Returns:
        Its ``summary.json``.
    """
    target = folder / f"{experiment}-s{seed}"
    command = [sys.executable, "-m", "rlplug", f"experiment={experiment}", f"seed={seed}", f"hydra.run.dir={target}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads((target / "summary.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=", ".join(TO_REACH))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--keep", type=Path, help="keep the run folders here, to draw curves of them")
    parser.add_argument("--override", action="append", default=[], help="a further override, e.g. algo.lr=1e-4")
    args = parser.parse_args()
    unknown = set(args.experiments) - set(TO_REACH)
    if unknown:
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}; there are {', '.join(TO_REACH)}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results, short = {}, False
    overrides = ["eval.every=2_000" if args.keep else "eval.every=0", *args.override]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        for name in args.experiments or TO_REACH:
            futures = [pool.submit(run, name, seed, folder, overrides) for seed in seeds]
            summaries = [future.result() for future in futures]
            scores = [summary["eval/return_mean"] for summary in summaries]
            mean, reached = statistics.mean(scores), statistics.mean(scores) >= TO_REACH[name]
            short |= not reached
            results[name] = {
                "scores": dict(zip(args.seeds.split(","), scores, strict=True)),
                "mean": mean,
                "to_reach": TO_REACH[name],
                "env_steps": max(summary["env_steps"] for summary in summaries),
                "wall_s": max(summary["wall_s"] for summary in summaries),
            }
            listed = ", ".join(f"{score:.1f}" for score in scores)
            print(
                f"{name:<28} mean {mean:8.1f}  to reach {TO_REACH[name]:6.0f}  {'ok' if reached else 'SHORT'}"
                f"  seeds [{listed}]  {results[name]['env_steps']} steps  {results[name]['wall_s']:.0f} s",
                flush=True,
            )
    out = Path(__file__).parent / "results" / "learning.json"
    out.parent.mkdir(exist_ok=True)
    known = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps(known | results, indent=2) + "\n")
    return int(short)


if __name__ == "__main__":
    sys.exit(main())

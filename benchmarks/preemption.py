"""Measure rounds of ranks of which the last one has environments that take five times as long, waited for or not.

    python benchmarks/preemption.py

DD-PPO with 2 ranks, and with 4 where there are as many cores; a step is a sleep, so that other processes hardly
matter. Results go to ``results/preemption.json``.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from rlplug.config import compose
from rlplug.run.launch import train

RESULTS = Path(__file__).parent / "results" / "preemption.json"
ROUNDS, ROWS, FACTOR = 40, 64, 5.0
LOOPS = {"waiting": "loop=alternate", "preempting": "loop=preemptive"}


def measure(ranks: int, loop: str, folder: Path) -> dict[str, float]:
    """Make a run of at most ``ROUNDS`` rounds' steps, one environment on each rank."""
    slow = (f"+env.kwargs.slow_rank={ranks - 1}", f"+env.kwargs.factor={FACTOR}", "+env.kwargs.seconds=0.004")
    words = (
        *("algo=ddppo", loop, "env=cartpole", "env.id=rlplug.testing.worlds:SlowCartPole-v0", *slow, "tuned=none"),
        *("hardware=cpu", f"hardware.devices={ranks}", f"num_envs={ranks}", f"rollout_fragment_length={ROWS}"),
        *(f"total_steps={ROUNDS * ROWS * ranks}", "algo.sgd_minibatch_size=64", "algo.num_sgd_iter=2"),
        *("logger.only=[]", "eval.every=0", "eval.episodes=1", "checkpoint.every=0", "model.hidden=[16]"),
    )
    train(compose(words), folder)
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["time/collect"]]
    seconds, updates = float(rows[-1]["time/collect"]), summary["updates"]
    shares = [float(share) for row in rows if (share := row.get("time/preempted"))]
    return {
        "rounds": updates,
        "env_steps": summary["env_steps"],
        "collect_s_per_round": seconds / updates,
        "env_steps_per_collect_s": summary["env_steps"] / seconds,
        "not_played": sum(shares) / len(shares) if shares else 0.0,
    }


def main() -> None:
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "factor": FACTOR, "rows": ROWS}
    with tempfile.TemporaryDirectory() as work:
        for ranks in (n for n in (2, 4) if n <= (os.cpu_count() or 1)):
            for name, loop in LOOPS.items():
                run = found[f"{ranks} ranks, {name}"] = measure(ranks, loop, Path(work) / f"{ranks}-{name}")
                print(
                    f"{ranks} ranks, {name:<10} {run['collect_s_per_round']:.3f} s of collection a round,"
                    f" {run['env_steps_per_collect_s']:.0f} steps/s, {run['rounds']} rounds, {run['env_steps']} steps,"
                    f" {run['not_played']:.0%} of rows not played",
                    flush=True,
                )
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How many seeds forks save: intervals of the effect of a setting, from pairs of forks and from independent runs.

    python benchmarks/forks.py              # three pairs of settings, ten seeds; some ten minutes on two cores
    python benchmarks/forks.py --seeds 20

For each pair, ``seeds`` runs train to the end; each is forked at a checkpoint with one other setting. The effect is the
mean difference of the final evaluation between the fork and its run. The same differences are also taken as if the runs
were independent. The results go to ``benchmarks/results/forks.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from rlplug.checkpointing.format import Checkpoint, checkpoints
from rlplug.results.statistics import paired_interval, pairing_gain, unpaired_interval

RESULTS = Path(__file__).parent / "results" / "forks.json"
COMMON = ("compile=off", "eval.every=0", "eval.episodes=50", "checkpoint.keep_last=20", "logger.only=[csv]")
PAIRS = {
    "PPO, CartPole-v1: lr x 3 for the last quarter": (
        ("algo=ppo", "env=cartpole", "tuned=none", "total_steps=24_000", "checkpoint.every=2000"),
        18_000,
        "algo.lr=9e-4",
    ),
    "PPO, CartPole-v1: gamma 0.99 to 0.9 for the last half": (
        ("algo=ppo", "env=cartpole", "tuned=none", "total_steps=24_000", "checkpoint.every=2000"),
        12_000,
        "algo.gamma=0.9",
    ),
    "SAC, Pendulum-v1: gamma 0.99 to 0.95 for the last third": (
        ("algo=sac", "env=pendulum", "tuned=none", "total_steps=6_000", "checkpoint.every=500", "model.hidden=[64,64]"),
        4_000,
        "algo.gamma=0.95",
    ),
}


def rlplug(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rlplug", *words], check=True, capture_output=True)


def score(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["eval/return_mean"]


def pair(folder: Path, settings: tuple[str, ...], at: int, change: str, seed: int) -> tuple[float, float]:
    """Train one run and its fork at the first checkpoint after ``at``; return the fork's and the run's score."""
    run, fork = folder / f"run{seed}", folder / f"fork{seed}"
    rlplug(*settings, *COMMON, f"seed={seed}", f"hydra.run.dir={run}")
    step = min(steps for path in checkpoints(run) if (steps := Checkpoint(path).steps) >= at)
    rlplug("fork", f"{run}@{step}", "--to", str(fork), change)
    return score(fork), score(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    results = {}
    for number, (name, (settings, at, change)) in enumerate(PAIRS.items()):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            place = Path(folder)
            scores = [*pool.map(partial(pair, place, settings, at, change), range(100 * number, 100 * number + seeds))]
        x, y = np.array(scores).T
        own, independent = paired_interval(x, y), unpaired_interval(x, y)
        results[name] = {
            "fork": x.tolist(),
            "run": y.tolist(),
            "difference": float(np.mean(x - y)),
            "paired": own,
            "unpaired": independent,
            "worth": pairing_gain(x, y),
        }
        print(f"{name}: {np.mean(x - y):.1f}, paired {own[0]:.1f} to {own[1]:.1f}, unpaired {independent[0]:.1f} to")
        print(f"    {independent[1]:.1f}; one pair tells as much as {pairing_gain(x, y):.1f} unpaired runs", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

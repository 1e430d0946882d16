"""Measure what needs a CUDA device. Results go to ``results/gpu.json``.

    python benchmarks/gpu.py                        # every case that this machine has devices for
    python benchmarks/gpu.py ppo_cartpole_torch     # 16,384 environments; the goal is 8 million steps a second
    python benchmarks/gpu.py '*halfcheetah' --rounds 5
    python benchmarks/gpu.py learns 'nccl*' --override hardware.precision=bf16-mixed

A case is a line behind ``python -m rlplug``, each round in a process of its own; cases take turns. The speed is that of
the run's own clock behind its first 30 %, in which graphs are compiled. LeanRL's figures are those that it publishes
for its compiled loops with CUDA graphs (https://github.com/pytorch-labs/LeanRL), on another machine: beside ours, and
no race. Where a case names what it has to return, the final evaluation has to reach it.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results" / "gpu.json"
WARM_UP = 0.3
QUIET = ("logger.only=[]", "eval.every=0", "checkpoint.every=0")


class Case(NamedTuple):
    """A line, how many devices it needs, and what is asked of it: steps a second, or a return."""

    line: str
    devices: int = 1
    goal: float | None = None
    leanrl: float | None = None
    learns: float | None = None


CARTPOLE = "algo=ppo env=cartpole_torch tuned=none"
MANY = (
    f"{CARTPOLE} num_envs=16384 rollout_fragment_length=32 algo.sgd_minibatch_size=131072 algo.num_sgd_iter=4"
    " total_steps=60_000_000 log.every=500_000"
)
LEAN_PPO = (
    "algo=ppo env=halfcheetah tuned=none num_envs=1 rollout_fragment_length=2048 algo.sgd_minibatch_size=64"
    " algo.num_sgd_iter=10 algo.lr=3e-4 preprocess.normalize_obs=true preprocess.normalize_reward=true"
    " total_steps=60_000 log.every=2048"
)
LEAN_OFF = "env=halfcheetah tuned=none num_envs=1 train_batch_size=256 total_steps=30_000 log.every=1000"
LEAN_PONG = (
    "algo=ppo env=pong tuned=none num_envs=8 rollout_fragment_length=128 algo.sgd_minibatch_size=256"
    " algo.num_sgd_iter=4 model=nature_cnn hardware=1gpu total_steps=200_000 log.every=4096"
)

CASES = {
    "ppo_cartpole_torch": Case(f"{MANY} hardware=1gpu", goal=8e6),
    "ppo_cartpole_torch_eager": Case(f"{MANY} hardware=1gpu compile=off"),
    "ppo_cartpole_torch_bf16": Case(f"{MANY} hardware=1gpu hardware.precision=bf16-mixed"),
    "ppo_halfcheetah": Case(f"{LEAN_PPO} hardware=1gpu", leanrl=1774),
    "sac_halfcheetah": Case(f"algo=sac {LEAN_OFF} hardware=1gpu", leanrl=725),
    "td3_halfcheetah": Case(f"algo=td3 {LEAN_OFF} hardware=1gpu", leanrl=936),
    "ppo_halfcheetah_eager": Case(f"{LEAN_PPO} hardware=1gpu compile=off"),
    "sac_halfcheetah_eager": Case(f"algo=sac {LEAN_OFF} hardware=1gpu compile=off"),
    "td3_halfcheetah_eager": Case(f"algo=td3 {LEAN_OFF} hardware=1gpu compile=off"),
    "ppo_pong": Case(LEAN_PONG, leanrl=6809),
    "ppo_pong_eager": Case(f"{LEAN_PONG} compile=off"),
    "learns_1gpu": Case("algo=ppo env=cartpole_torch hardware=1gpu", learns=475),
    "learns_bf16": Case("algo=ppo env=cartpole_torch hardware=1gpu hardware.precision=bf16-mixed", learns=475),
    "learns_pendulum": Case("algo=ppo env=pendulum_torch hardware=1gpu", learns=-250),
    "nccl_ppo": Case("algo=ppo env=cartpole_torch hardware=1gpu hardware.devices=2", devices=2, learns=475),
    "nccl_sac": Case("algo=sac env=pendulum num_envs=2 hardware=1gpu hardware.devices=2", devices=2, learns=-180),
}


def measure(case: Case, overrides: list[str], folder: Path) -> dict[str, float]:
    """Run a case once, and return its speed and what its final evaluation returned.

    Raises:
        SystemExit: the run failed.
    """
    command = [sys.executable, "-m", "rlplug", *case.line.split(), *QUIET, *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    summary = json.loads((folder / "summary.json").read_text())
    return {"steps_per_s": speed(folder / "metrics.csv"), "return": summary["eval/return_mean"]}


def speed(metrics: Path) -> float:
    """Return the environment steps a second behind the warm-up.

    Raises:
        SystemExit: there are no two rows behind it.
    """
    with metrics.open(newline="") as file:
        rows = [(float(row["step"]), float(row["time/wall_s"])) for row in csv.DictReader(file) if row["time/wall_s"]]
    late = [row for row in rows if row[0] >= WARM_UP * rows[-1][0]] if rows else []
    if len(late) < 2:
        raise SystemExit(f"{metrics} has no two rows behind the first {WARM_UP:.0%}; take a lower log.every")
    (first, began), (last, ended) = late[0], late[-1]
    return (last - first) / (ended - began)


def found() -> int:
    """Return how many CUDA devices there are.

    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py measures CUDA devices, and none is found here; nothing was run")
    return torch.cuda.device_count()


def told(case: Case, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return what is kept of a case's rounds."""
    speeds, returns = ([one[key] for one in rounds] for key in ("steps_per_s", "return"))
    result: dict[str, Any] = {"line": case.line, "steps_per_s": statistics.median(speeds), "rounds": speeds}
    result |= {"return": statistics.mean(returns), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    bars = {"goal": case.goal, "leanrl": case.leanrl, "learns": case.learns}
    result |= {name: value for name, value in bars.items() if value is not None}
    slow = case.goal is not None and result["steps_per_s"] < case.goal
    return result | {"ok": not slow and (case.learns is None or result["return"] >= case.learns)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--override", action="append", default=[], help="a further override of every case")
    args = parser.parse_args()
    asked = args.cases or ["*"]
    names = [name for name in CASES if any(fnmatch(name, word) or name.startswith(f"{word}_") for word in asked)]
    if not names:
        parser.error(f"no such case; there are {', '.join(CASES)}")
    devices = found()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rounds: dict[str, list[dict[str, float]]] = {}
    for name in names:
        if CASES[name].devices > devices:
            print(f"{name:<28} left out: it needs {CASES[name].devices} CUDA devices, and there is {devices}")
    names = [name for name in names if CASES[name].devices <= devices]
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for name in names:
                one = measure(CASES[name], args.override, Path(temporary) / f"{name}-{number}")
                rounds.setdefault(name, []).append(one)
                results[name] = told(CASES[name], rounds[name])
                RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    for name in names:
        result = results[name]
        beside = "".join(f"  {key} {result[key]:,}" for key in ("goal", "leanrl", "learns") if key in result)
        said = f"{result['steps_per_s']:>14,.0f} steps/s  return {result['return']:8.1f}"
        print(f"{name:<28} {said}{beside}  {'ok' if result['ok'] else 'SHORT'}")
    return int(not all(results[name]["ok"] for name in names))


if __name__ == "__main__":
    sys.exit(main())

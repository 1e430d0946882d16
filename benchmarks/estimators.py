"""Off-policy estimates against what the policies really return, on CartPole.

    python benchmarks/estimators.py                      # an hour on one core
    python benchmarks/estimators.py --repeats 3 --episodes 200 --folder runs/x      # a look

One PPO run is trained, and checkpoints of it are taken. One of them is the behavior: it plays episodes by drawn
actions, whose log-probabilities are written down, another set for each repeat. Three others are judged by these sets,
and each plays 400,000 episodes of its own, whose mean return is the truth. ``results/estimators.json`` gets for each
policy and method the root mean squared error over the repeats and how many intervals held the truth, and the table of
``docs/estimates.md`` shows them. What is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from shared import write_table

import rlplug
from rlplug.results.evaluate import estimate, evaluate

HERE = Path(__file__).parent
RESULTS, FOLDER = HERE / "results" / "estimators.json", HERE.parent / "runs" / "estimators"
PAGE = HERE.parent / "docs" / "estimates.md"

TRAIN = ("algo=ppo", "env=cartpole", "tuned=none", "algo.lr=2.5e-4", "total_steps=10_240", "seed=100")
EVERY = 1024  # steps of training between two checkpoints
BEHAVIOR, TARGETS = 7, {"worst": 5, "worse": 6, "better": 8}  # numbers of checkpoints
TRUTH, PLAYED = 100_000, (7, 8, 9, 10)  # episodes of each of these seeds
METHODS = ("episode_is", "step_is", "episode_wis", "step_wis", "dm", "dr", "wdr")


def train(folder: Path) -> list[Path]:
    """Train the run unless it is there; return its checkpoints in order."""
    if not (folder / "summary.json").exists():
        often = (f"checkpoint.every={EVERY}", "checkpoint.keep_last=100", "eval.every=0", "eval.episodes=1")
        rlplug.train([*TRAIN, *often, "logger.only=[]", "hardware=cpu", f"hydra.run.dir={folder}"])
    return sorted((folder / "checkpoints").glob("step_*"))


def kept(path: Path, make: Any) -> Any:
    """Return what a file of JSON holds, which is made if it is not there."""
    if not path.exists():
        text = json.dumps(make())
        path.write_text(text + "\n")
    return json.loads(path.read_text())


def played(checkpoint: Path, episodes: int, seed: int, record: Path | None = None) -> dict[str, Any]:
    """Let a policy play by drawn actions."""
    words = [f"eval.episodes={episodes}", f"seed={seed}", "hardware=cpu"]
    return evaluate(checkpoint, words + ([] if record is None else [f"record.path={record}"]), print, "explore")


def summary(truths: list[dict[str, Any]], estimates: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the estimates of every repeat with the truth."""
    mean, methods = float(np.mean([truth["eval/return_mean"] for truth in truths])), dict[str, Any]()
    deviation = np.mean([truth["eval/return_std"] for truth in truths])
    for method in METHODS:
        values, low, high = (
            np.array([one[f"estimate/{method}{end}"] for one in estimates]) for end in ("", "_low", "_high")
        )
        methods[method] = {
            "mean": float(values.mean()),
            "rmse": float(np.sqrt(np.square(values - mean).mean())),
            "held": int(((low <= mean) & (mean <= high)).sum()),
            "width": float((high - low).mean()),
        }
    return {
        "truth": mean,
        "truth_error": float(deviation / (TRUTH * len(truths)) ** 0.5),
        "effective_sample_size": float(np.mean([one["estimate/effective_sample_size"] for one in estimates])),
        "methods": methods,
    }


def rows(results: dict[str, Any]) -> list[str]:
    """Return the table of the page."""
    sets = f"{results['repeats']} repeats of {results['episodes']} episodes; behavior: {results['behavior']:.1f}"
    out = [sets, "", f"| policy | truth | effective episodes | {' | '.join(f'`{method}`' for method in METHODS)} |"]
    out.append("|---" * (3 + len(METHODS)) + "|")
    for name, one in results["policies"].items():
        best = min(one["methods"].values(), key=lambda found: found["rmse"])
        cells = []
        for found in one["methods"].values():
            mark = "**" if found is best else ""
            cells.append(f"{mark}{found['rmse']:.2f}{mark} ({found['held']})")
        truth = f"{one['truth']:.2f} ± {one['truth_error']:.2f}"
        out.append(f"| {name} | {truth} | {one['effective_sample_size']:.0f} | {' | '.join(cells)} |")
    pooled = {m: [one["methods"][m] for one in results["policies"].values()] for m in METHODS}
    rmse = {m: float(np.sqrt(np.mean([found["rmse"] ** 2 for found in every]))) for m, every in pooled.items()}
    held = {m: sum(found["held"] for found in every) for m, every in pooled.items()}
    best = min(rmse, key=lambda m: rmse[m])
    cells = [f"**{rmse[m]:.2f}** ({held[m]})" if m == best else f"{rmse[m]:.2f} ({held[m]})" for m in METHODS]
    return [*out, f"| all | | | {' | '.join(cells)} |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=2000, help="of a set")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    folder = args.folder.absolute()
    checkpoints = train(folder / "run")
    behavior = checkpoints[BEHAVIOR - 1]
    returns = []
    for k in range(args.repeats):
        data = folder / "data" / str(k)
        done = kept(folder / f"data-{k}.json", lambda d=data, k=k: played(behavior, args.episodes, 1000 + k, d))
        returns.append(done["eval/return_mean"])
    results: dict[str, Any] = {
        "train": " ".join(TRAIN),
        "repeats": args.repeats,
        "episodes": args.episodes,
        "behavior": float(np.mean(returns)),
        "policies": {},
    }
    targets = {name: checkpoints[number - 1] for name, number in TARGETS.items()}
    estimates: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
    for k in range(args.repeats):
        words = [f"data.path={folder / 'data' / str(k)}", f"seed={k}", "hardware=cpu"]
        for name, target in targets.items():
            path = folder / f"{name}-{k}.json"
            estimates[name].append(kept(path, lambda t=target, w=words: estimate(t, w, print)))
    for name, target in targets.items():
        truths = [
            kept(folder / f"{name}-truth-{seed}.json", lambda t=target, s=seed: played(t, TRUTH, s)) for seed in PLAYED
        ]
        results["policies"][name] = one = summary(truths, estimates[name])
        print(f"{name}: {one['truth']:.2f} ± {one['truth_error']:.2f}, behavior {results['behavior']:.2f}")
        for method, found in one["methods"].items():
            held = f"{found['held']} of {args.repeats} intervals hold it, {found['width']:.2f} wide"
            print(f"  {method:<11} {found['mean']:8.2f}, RMSE {found['rmse']:7.2f}; {held}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write_table(PAGE, "estimators", rows(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

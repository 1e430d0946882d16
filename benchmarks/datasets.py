"""Make data sets to learn from: train behavior policies, and write down what they play.

    python benchmarks/datasets.py cartpole pendulum         # some minutes
    python benchmarks/datasets.py halfcheetah               # an hour
    python benchmarks/datasets.py cartpole --folder data    # elsewhere than in runs/datasets

For each environment there are four sets, as is usual since D4RL (Fu et al. 2020, arXiv:2004.07219): ``random``,
``medium`` (of a policy that was stopped early), ``expert`` (of one that was trained to the end) and ``mixed`` (of all
three). Actions are drawn from the policies, and their log-probabilities stand beside them. Sizes and the behavior's
mean returns are printed, kept in ``results/datasets.json`` and shown in ``docs/data.md``. Nothing is downloaded, and a
set that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import rlplug, trained, write_table

from rlplug.data.recording import Recording
from rlplug.data.source import Reading

HERE = Path(__file__).parent
RESULTS, FOLDER = HERE / "results" / "datasets.json", HERE.parent / "runs" / "datasets"
PAGE = HERE.parent / "docs" / "data.md"


@dataclass(frozen=True)
class Behavior:
    """A run that is trained, and how its policy acts: ``--explore`` or ``--random``."""

    line: str
    mode: str = "--explore"


@dataclass(frozen=True)
class Sets:
    """The policies of an environment, and how many episodes each plays for every set."""

    behaviors: Mapping[str, Behavior]
    episodes: Mapping[str, Mapping[str, int]]


def sets(behaviors: Mapping[str, Behavior], alone: Mapping[str, int], mixed: Mapping[str, int]) -> Sets:
    return Sets(behaviors, {name: {name: n} for name, n in alone.items()} | {"mixed": mixed})


UNTRAINED = "total_steps=600 num_steps_sampled_before_learning_starts=500 train_batch_size=32"
SETS = {
    "cartpole": sets(
        {
            "random": Behavior(f"algo=sac env=cartpole tuned=none {UNTRAINED}", "--random"),
            "medium": Behavior("algo=ppo env=cartpole total_steps=12_000"),
            "expert": Behavior("algo=ppo env=cartpole"),
        },
        {"random": 1000, "medium": 200, "expert": 100},
        {"random": 500, "medium": 100, "expert": 20},
    ),
    "pendulum": sets(
        {
            "random": Behavior(f"algo=sac env=pendulum {UNTRAINED}", "--random"),
            "medium": Behavior("algo=sac env=pendulum total_steps=3_000"),
            "expert": Behavior("algo=sac env=pendulum"),
        },
        {"random": 200, "medium": 200, "expert": 200},
        {"random": 70, "medium": 70, "expert": 70},
    ),
    "halfcheetah": sets(
        {
            "random": Behavior(f"algo=sac env=halfcheetah tuned=none {UNTRAINED}", "--random"),
            "medium": Behavior("algo=sac env=halfcheetah total_steps=50_000 compile=max"),
            "expert": Behavior("algo=sac env=halfcheetah compile=max"),
        },
        {"random": 300, "medium": 300, "expert": 300},
        {"random": 100, "medium": 100, "expert": 100},
    ),
}


def make(env: str, name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Train the policies of a set and write it, unless it is there; return what is in it.

    Args:
        folder: ``<folder>/<env>/<name>`` is what ``data.path`` names.
    """
    target = folder / env / name
    if not (done := folder / env / f"{name}.json").exists():
        for behavior, episodes in SETS[env].episodes[name].items():
            how, quiet = SETS[env].behaviors[behavior], ("logger.only=[]", "eval.every=0", "hardware=cpu", "seed=100")
            run = trained(folder / env / "behaviors" / behavior, [*how.line.split(), *quiet])
            rlplug("evaluate", str(run), how.mode, f"eval.episodes={episodes}", "seed=100", f"record.path={target}")
        data = Recording([str(target)], Reading())
        about = {"episodes": len(data.lengths), "steps": data.steps(), "return_mean": float(data.returns.mean())}
        about |= {"return_std": float(data.returns.std()), "bytes": sum(p.stat().st_size for p in target.iterdir())}
        done.write_text(json.dumps(about) + "\n")
    found: dict[str, Any] = json.loads(done.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", default=["cartpole", "pendulum"], choices=SETS, metavar="env")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for env in args.envs:
        for name in SETS[env].episodes:
            about = results.setdefault(env, {})[name] = make(env, name, args.folder.absolute())
            mean = f"return {about['return_mean']:10,.1f} ± {about['return_std']:,.1f}"
            size = f"{about['episodes']:5,} episodes, {about['steps']:9,} steps, {about['bytes'] / 2**20:6.1f} MiB"
            print(f"{env:<12} {name:<7} {size}  {mean}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    rows = [
        "| environment | set | episodes | steps | mean return | deviation | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for env, every in sorted(results.items()):
        for name, about in every.items():
            size = f"{about['episodes']:,} | {about['steps']:,}"
            spread = f"{about['return_mean']:,.1f} | {about['return_std']:,.1f}"
            rows.append(f"| {env} | `{name}` | {size} | {spread} | {about['bytes'] / 2**20:.1f} |")
    write_table(PAGE, "datasets", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

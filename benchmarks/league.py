"""Measure the exploitability of self-play and of a league in rock-paper-scissors.

    python benchmarks/league.py [--steps 200000] [--variant weighted]

The exploitability of a strategy is what a best response gains against it; it is 0 at the equilibrium. Writes
``docs/img/league.svg`` and ``benchmarks/results/league.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplug import compose
from rlplug.checkpointing.format import find
from rlplug.envs.matrix_games import exploitability, rock_paper_scissors
from rlplug.results import plot
from rlplug.results.curves import Curve
from rlplug.run import launch
from rlplug.run.build import build

ROOT = Path(__file__).parents[1]
RUNS = {"self-play": ["algo.self_play=1"], "league": ["algo.self_play=0", "algo.opponents=uniform"]}
SETTINGS = ["algo=league", "env=rock_paper_scissors", "num_envs=64", "rollout_fragment_length=8", "algo.size=10000"]
SETTINGS += ["algo.every=5", "algo.algo.lr=1e-2", "algo.algo.entropy_coeff=0.3", "eval.every=0", "eval.episodes=1"]
SETTINGS += ["logger.only=[]", "compile=off", "hardware=cpu"]


def strategies(words: list[str]) -> np.ndarray:
    """Train, and return the probabilities of the actions of every copy, ``[copies, A]``."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*SETTINGS, *words])
        launch.train(config, Path(folder, "run"), tell=lambda line: None)
        trainer = build(config, Path(folder, "again"))
        trainer.policy.load(find(Path(folder, "run")).tree("weights"))
        trainer.close()
    pool: Any = trainer.algorithm.pool
    n = int(trainer.ctx.spec.groups["players"].action.n)
    rows, actions = {"obs": torch.ones(1, 1)}, [torch.tensor([action]) for action in range(n)]
    with torch.no_grad():
        found = [copy.net.dist(rows, {})[0] for copy in pool.members]
        return np.array([[float(one.logp(action).exp()) for action in actions] for one in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--variant", default="weighted")
    given = parser.parse_args()
    payoff, found, curves = rock_paper_scissors(given.variant), dict[str, Any](), list[Curve]()
    for name, words in RUNS.items():
        played = strategies([*words, f"total_steps={given.steps}", f"env.variant={given.variant}"])
        steps = np.arange(1, len(played) + 1) * 5 * 64 * 8 // 2
        means = played.cumsum(0) / np.arange(1, len(played) + 1)[:, None]
        for label, of in ((f"{name}, latest", played), (f"{name}, average", means)):
            values = np.array([exploitability(payoff, strategy) for strategy in of])
            found[label] = {"first": float(values[0]), "last quarter": float(values[-len(values) // 4 :].mean())}
            curves.append(Curve(label, steps, values[None]))
            print(f"{label:20} {found[label]}")
    figure = plot.draw(curves, "environment steps", "exploitability", f"rock-paper-scissors, {given.variant}", 5.0)
    plot.save(figure, [ROOT / "docs" / "img" / "league.svg"])
    about = {"variant": given.variant, "steps": given.steps, "exploitability": found}
    (ROOT / "benchmarks" / "results" / "league.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()

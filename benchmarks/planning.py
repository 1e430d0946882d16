"""Compare what AlphaZero learned with exact solutions: tours with the shortest ones, or packed with the best value.

python benchmarks/planning.py <run of env=tsp or env=knapsack> [--episodes 200] [--seed 1000]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
import yaml

import rlplug
from rlplug.api import Algorithm, Job, Play
from rlplug.config import choose
from rlplug.context import EnvShard, RunContext
from rlplug.plugins.env.combinatorial import TSP, Knapsack
from rlplug.types import EnvSpec


def shortest(cities: np.ndarray) -> float:
    """Return the length of the shortest tour of ``cities [n, 2]``, by trying all."""
    distance = np.linalg.norm(cities[:, None] - cities[None], axis=-1)
    orders = np.array([*itertools.permutations(range(1, len(cities)))])
    home = np.zeros((len(orders), 1), np.int64)
    tours = np.concatenate((home, orders, home), 1)
    return float(distance[tours[:, :-1], tours[:, 1:]].sum(1).min())


def excess(algorithm: Algorithm, play: Play, episodes: int) -> dict[str, float]:
    """Evaluate by how much tours are longer than the shortest ones: ``eval.function`` of the proof for env=tsp.

    Returns:
        ``eval/return_mean``, the excess in percent, negative; and ``eval/optimal``, the fraction of shortest tours.
    """
    ((_, batch),) = play([Job(0, episodes=episodes, mode="greedy")])
    length, places = -batch["return"].numpy(), batch["obs"][0].numpy()
    n = places.shape[1] // 4  # coordinates [2, n], what was visited [n], and the present city, one-hot [n]
    best = np.array([shortest(place[: 2 * n].reshape(2, n).T) for place in places])
    optimal = float(np.isclose(length, best, rtol=1e-5).mean())
    return {"eval/return_mean": 100.0 * float(1.0 - length.mean() / best.mean()), "eval/optimal": optimal}


def heaviest(values: np.ndarray, weights: np.ndarray, capacity: float) -> float:
    """Return the largest value that fits, by trying all sets."""
    sets = np.array([*itertools.product((0, 1), repeat=len(values))])
    return float((sets @ values)[sets @ weights <= capacity].max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    agent, n = rlplug.load(given.run), given.episodes
    node = yaml.safe_load((given.run / "config.yaml").read_text())["env"]
    env = choose("env", "env", node).build(RunContext(spec=EnvSpec({})).derive(shard=EnvShard("eval", n, range(n))))
    row, paid, over = env.reset(range(given.seed, given.seed + n)), np.zeros(n), np.zeros(n, np.bool_)
    first = row["env_state"].numpy()
    while not over.all():
        given_row = {key: row[key].numpy() for key in ("action_mask", "env_state")}
        action = agent.act(row["obs"].numpy(), **given_row)
        row = env.step(torch.as_tensor(action))
        paid += np.where(over, 0.0, row["reward"].numpy())
        over |= (row["terminated"] | row["truncated"]).numpy()
    match env:
        case TSP():
            best = -np.array([shortest(state[: 2 * env.n].reshape(2, -1).T) for state in first])
        case Knapsack():
            best = np.array([heaviest(*state[: 2 * env.n].reshape(2, -1), state[3 * env.n]) for state in first])
        case _:
            raise SystemExit(f"{given.run} has neither env=tsp nor env=knapsack")
    gap = np.abs(paid.mean() - best.mean()) / np.abs(best.mean())
    exact = float(np.isclose(paid, best, rtol=1e-6).mean())
    print(f"{n} episodes: return {paid.mean():.4f}, optimum {best.mean():.4f}: {gap:.2%} off; {exact:.0%} are optimal")


if __name__ == "__main__":
    main()

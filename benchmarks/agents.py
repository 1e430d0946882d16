"""Measure steps a second of simple_spread: PettingZoo's loop, env=simple_spread and env=spread_torch.

    python benchmarks/agents.py    # about a minute; writes the table of docs/environments.md

One thread; every agent takes a fixed random action. The loops take turns, three times, and the median counts. A step is
one of an environment, in which all three agents act.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mpe2 import simple_spread_v3
from shared import write_table

from rlplug.config import compose
from rlplug.context import EnvShard, RunContext
from rlplug.types import EnvSpec

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "agents.json", HERE.parent / "docs" / "environments.md"
CASES = {"pettingzoo": (1, 1500), "env=simple_spread": (8, 200), "env=spread_torch": (8, 1000)}
MANY = {"env=spread_torch num_envs=4096": (4096, 60)}


def raw() -> Callable[[], None]:
    """Return a step of PettingZoo's parallel environment, which is reset when it ends."""
    env, rng = simple_spread_v3.parallel_env(), np.random.default_rng(0)
    env.reset(seed=0)
    actions = [dict(zip(env.possible_agents, rng.integers(5, size=3).tolist(), strict=True)) for _ in range(64)]
    count = 0

    def step() -> None:
        nonlocal count
        if not env.agents:
            env.reset()
        else:
            env.step(actions[count % 64])
        count += 1

    return step


def vector(words: str, columns: int) -> Callable[[], None]:
    """Return a step of all columns of an environment."""
    ctx = RunContext(spec=EnvSpec({})).derive(shard=EnvShard("learner", columns, range(columns)))
    env = compose([words]).env.build(ctx)
    env.reset(range(columns))
    actions = np.random.default_rng(0).integers(5, size=(64, columns, 3))
    count = 0

    def step() -> None:
        nonlocal count
        env.step(actions[count % 64])
        count += 1

    return step


def measure() -> dict[str, float]:
    """Return the median of steps a second of every case."""
    steps = {
        name: (raw() if name == "pettingzoo" else vector(name.split()[0], n), n, many)
        for name, (n, many) in (CASES | MANY).items()
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for _ in range(3):
            for name, (step, columns, many) in steps.items():
                began = time.process_time()
                for _ in range(many):
                    step()
                rates[name].append(columns * many / (time.process_time() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


def table(rates: dict[str, float]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| loop | environments | steps a second |", "|---|---|---|"]
    for name, rate in rates.items():
        columns, _ = (CASES | MANY)[name]
        shown = "`simple_spread_v3.parallel_env()` alone" if name == "pettingzoo" else f"`{name.split()[0]}`"
        lines.append(f"| {shown} | {columns:,} | {rate:,.0f} |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = measure()
    RESULTS.write_text(json.dumps({name: round(rate) for name, rate in found.items()}, indent=1) + "\n")
    write_table(PAGE, table(found), "agents")

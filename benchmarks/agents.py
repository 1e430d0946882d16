"""Measure steps a second of simple_spread: PettingZoo's loop, env=simple_spread and env=spread_torch.

    python benchmarks/agents.py    # about a minute; writes the table of docs/environments.md

One thread, and seconds of its CPU time; every agent takes a fixed random action. The loops take turns, three times, and
the median counts. A step is one of an environment, in which all three agents act.
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
RAW = "simple_spread_v3.parallel_env()"
CASES = (
    (RAW, 1, 1500),
    ("env=simple_spread", 8, 200),
    ("env=simple_spread env.global_state=false", 8, 200),
    ("env=spread_torch", 8, 1000),
    ("env=spread_torch", 4096, 60),
)
"""words, environments, and steps of all of them at a time"""


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
    env = compose(words.split()).env.build(ctx)
    env.reset(range(columns))
    actions = np.random.default_rng(0).integers(5, size=(64, columns, 3))
    count = 0

    def step() -> None:
        nonlocal count
        env.step(actions[count % 64])
        count += 1

    return step


def measure() -> list[dict[str, object]]:
    """Return every case with the median of its steps a second."""
    steps = [raw() if words == RAW else vector(words, columns) for words, columns, _ in CASES]
    rates: list[list[float]] = [[] for _ in CASES]
    with torch.inference_mode():
        for _ in range(3):
            for (_, columns, many), step, found in zip(CASES, steps, rates, strict=True):
                began = time.process_time()
                for _ in range(many):
                    step()
                found.append(columns * many / (time.process_time() - began))
    return [
        {"env": words, "num_envs": columns, "steps_per_s": round(statistics.median(found))}
        for (words, columns, _), found in zip(CASES, rates, strict=True)
    ]


def table(rates: list[dict[str, object]]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| loop | environments | steps a second |", "|---|---|---|"]
    return lines + [f"| `{case['env']}` | {case['num_envs']:,} | {case['steps_per_s']:,} |" for case in rates]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = measure()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    write_table(PAGE, "agents", table(found))

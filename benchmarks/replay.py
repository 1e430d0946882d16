"""Batches of 256 a second from a replay of vectors, and the cost of adding a row, beside Stable-Baselines3's buffer.

    python benchmarks/replay.py
    python benchmarks/replay.py --rounds 9

A replay of 1,000,000 transitions of 17 numbers and 6 actions, as HalfCheetah's, one thread. Prioritized: drawing a
batch and taking back its priorities; beside it, the same by the binary tree of NumPy that many libraries have, without
rows. Stable-Baselines3 runs in the environment that ``benchmarks/peers.py`` makes. All take turns; medians. Results go
to ``results/replay.json`` and ``docs/results.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shared import write_table

HERE = Path(__file__).parent
ROWS, BATCH, SIZES = 1_000_000, 256, {"obs": 17, "action": 6}


def seconds(call: Callable[[], Any], times: int) -> float:
    """Return the seconds of one call."""
    for _ in range(times // 10):
        call()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def ours(kind: str) -> dict[str, float]:
    """Measure ``replay`` or ``prioritized``."""
    import torch

    from rlplug.api import Needs, Segment
    from rlplug.plugins.buffer.prioritized import Prioritized
    from rlplug.plugins.buffer.replay import Replay
    from rlplug.testing.configs import config
    from rlplug.testing.context import context

    torch.set_num_threads(1)
    needs = Needs(data="windows", keys=("obs", "action", "reward", "terminated", "valid"), off_policy=True)
    ctx = context(needs=needs, batch_size=BATCH, rollout_length=1000)
    buffer = {"replay": Replay, "prioritized": Prioritized}[kind](config(f"buffer/{kind}", capacity=ROWS), ctx)

    def segment(rows: int) -> Segment:
        batch: dict[str, Any] = {key: torch.randn(rows + 1, 1, size) for key, size in SIZES.items()}
        batch |= {"reward": torch.randn(rows + 1, 1), "terminated": torch.zeros(rows + 1, 1, dtype=torch.bool)}
        return Segment(batch | {"valid": torch.ones(rows + 1, 1, dtype=torch.bool)})

    for _ in range(ROWS // 1000 - 1):
        buffer.add(segment(1000))
    row, priority = segment(1), torch.rand(BATCH)

    def draw() -> None:
        index = buffer.sample()["index"]
        if kind == "prioritized":
            buffer.feedback(index, {"priority": priority})

    return {"batches_per_s": 1.0 / seconds(draw, 2000), "add_us": 1e6 * seconds(lambda: buffer.add(row), 5000)}


def sb3() -> dict[str, float]:
    """Measure the buffer of Stable-Baselines3, in its environment."""
    import gymnasium
    import torch
    from stable_baselines3.common.buffers import ReplayBuffer

    torch.set_num_threads(1)
    obs, action = (gymnasium.spaces.Box(-1.0, 1.0, (size,), np.float32) for size in SIZES.values())
    buffer = ReplayBuffer(ROWS, obs, action, "cpu", n_envs=1, handle_timeout_termination=True)
    row = [np.random.randn(1, size).astype(np.float32) for size in (17, 17, 6)]
    row += [np.zeros(1, np.float32), np.zeros(1, np.bool_)]
    for _ in range(ROWS):
        buffer.add(*row, [{}])
    times = 2000, 5000
    return {
        "batches_per_s": 1.0 / seconds(lambda: buffer.sample(BATCH), times[0]),
        "add_us": 1e6 * seconds(lambda: buffer.add(*row, [{}]), times[1]),
    }


def binary_tree() -> dict[str, float]:
    """Measure drawing and setting by a binary tree, level by level, as OpenAI's baselines have it, in NumPy."""
    size, rng = 1 << (ROWS - 1).bit_length(), np.random.default_rng(0)
    sums = np.zeros(2 * size)
    sums[size : size + ROWS] = rng.random(ROWS)
    for i in range(size.bit_length() - 2, -1, -1):
        level = np.arange(1 << i, 2 << i)
        sums[level] = sums[2 * level] + sums[2 * level + 1]
    weight = rng.random(BATCH)

    def draw() -> None:
        rest, node = rng.random(BATCH) * sums[1], np.ones(BATCH, np.int64)
        while node[0] < size:
            left = 2 * node
            right = rest > sums[left]
            rest = np.where(right, rest - sums[left], rest)
            node = np.where(right, left + 1, left)
        sums[node] = weight
        while node[0] > 1:
            node = np.unique(node // 2)
            sums[node] = sums[2 * node] + sums[2 * node + 1]

    return {"batches_per_s": 1.0 / seconds(draw, 1000)}


WHO: dict[str, Callable[[], dict[str, float]]] = {
    "rlplug replay": lambda: ours("replay"),
    "Stable-Baselines3": sb3,
    "rlplug prioritized": lambda: ours("prioritized"),
    "binary tree in NumPy": binary_tree,
}


def turn(name: str) -> dict[str, float]:
    """Measure in a process of its own."""
    python = HERE / ".peers" / "sb3" / "bin" / "python" if name == "Stable-Baselines3" else sys.executable
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [str(python), __file__, "--measure", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def table(medians: dict[str, dict[str, float]]) -> list[str]:
    """Return the rows of ``docs/results.md``."""
    lines = ["| | batches of 256 a second | a row is added in |", "|---|---|---|"]
    for name, seen in medians.items():
        added = f"{seen['add_us']:.1f} us" if "add_us" in seen else ""
        lines.append(f"| {name} | {seen['batches_per_s']:,.0f} | {added} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", choices=list(WHO), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(WHO[args.measure]()))
        return
    import peers  # beside this file

    peers.python_of("sb3")
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in WHO}
    for _ in range(args.rounds):
        for name in WHO:
            seen[name].append(turn(name))
    found = {
        name: {key: round(statistics.median(said[key] for said in turns), 1) for key in turns[0]}
        for name, turns in seen.items()
    }
    for name, medians in found.items():
        print(f"{name:24s}" + "".join(f"  {key} {value:,.1f}" for key, value in medians.items()))
    text = json.dumps({"rounds": args.rounds, "load": round(os.getloadavg()[0], 2), "medians": found}, indent=1)
    (HERE / "results" / "replay.json").write_text(text + "\n")
    write_table(HERE.parent / "docs" / "results.md", "replay", table(found))


if __name__ == "__main__":
    main()

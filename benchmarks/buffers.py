"""What replays of Atari frames take: bytes of memory, and how long storing and sampling last.

    python benchmarks/buffers.py                                 # 1,000,000 frames, of which 100,000 from Pong with LZ4
    python benchmarks/buffers.py --frames 100000 --pong 20000

Memory is what the process has more of when the replay is full (resident set), beside what the frames themselves would
take. Frames of the large replay are made up, because their content does not matter; those that are compressed are
played by random actions in Pong (ALE's vector environment, its own preprocessing, stacks of 4), and the memory of a
full replay is extrapolated from those. Speeds are the best of several turns. Results go to ``results/buffers.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces

from rlplug.api import Buffer, Needs, Segment
from rlplug.config import choose, default_node
from rlplug.testing.context import context, spec
from rlplug.types import Batch, EnvSpec

COLUMNS, STACK, SIZE = 8, 4, 84
FRAME = SIZE * SIZE
SPEC = EnvSpec(spec(spaces.Box(0, 255, (STACK, SIZE, SIZE), np.uint8), 6).groups, frame_stack=STACK)


def make(name: str, capacity: int, batch: int = 32, **changes: Any) -> Buffer:
    sequence = name == "sequence"
    needs = (
        Needs(window=80, burn_in=40, carry_stride=40, data="windows", off_policy=True, keys=("obs", "action", "carry"))
        if sequence
        else Needs(window=1, data="windows", off_policy=True, keys=("obs", "action"))
    )
    ctx = context(SPEC, needs=needs, num_envs=COLUMNS, batch_size=batch)
    return choose("buffer", "buffer", default_node("buffer", name) | {"capacity": capacity} | changes).build(ctx)


def row() -> Batch:
    """Room for a segment of one transition."""
    flags = {key: torch.zeros(2, COLUMNS, dtype=torch.bool) for key in ("terminated", "truncated", "is_first", "valid")}
    numbers = {"action": torch.zeros(2, COLUMNS, dtype=torch.int64), "reward": torch.zeros(2, COLUMNS)}
    return flags | numbers | {"obs": torch.zeros(2, COLUMNS, STACK, SIZE, SIZE, dtype=torch.uint8)}


def made_up() -> Iterator[Batch]:
    """Segments of frames that are all different."""
    segment, dice = row(), np.random.default_rng(0)
    obs, noise = segment["obs"].numpy(), dice.integers(0, 256, (256, SIZE, SIZE), np.uint8)
    segment["valid"][0] = True
    for t in range(2**62):
        obs[0] = obs[1]
        obs[1, :, :-1] = obs[0, :, 1:]
        obs[1, :, -1] = noise[t % 256]
        obs[1, :, -1, 0, :4] = list(t.to_bytes(8, "little")[:4])
        segment["is_first"][0] = t == 0
        if t == 0:
            obs[0] = 0
        yield segment


def played() -> Iterator[Batch]:
    """Segments of Pong under random actions; its environments are there before the first one is asked for."""
    env: Any = AtariVectorEnv("pong", COLUMNS)
    env.reset(seed=np.arange(COLUMNS))
    env.step(np.zeros(COLUMNS, np.int64))
    return _played(env)


def _played(env: Any) -> Iterator[Batch]:
    segment, dice, over = row(), np.random.default_rng(0), np.zeros(COLUMNS, np.bool_)
    obs, valid, first = (segment[key].numpy() for key in ("obs", "valid", "is_first"))
    obs[1], _ = env.reset(seed=np.arange(COLUMNS))
    first[1] = True
    while True:
        obs[0], first[0], valid[0] = obs[1], first[1], ~over
        obs[1], _, terminated, truncated, _ = env.step(dice.integers(0, 6, COLUMNS))
        first[1], over = over, terminated | truncated
        yield segment


def fill(buffer: Buffer, segments: Iterator[Batch], frames: int) -> float:
    """Seconds of storing one segment, in the mean."""
    spent = 0.0
    for _ in range(-(-frames // COLUMNS)):
        segment = next(segments)
        start = time.perf_counter()
        buffer.add(Segment(segment))
        spent += time.perf_counter() - start
    return spent / (frames / COLUMNS)


def memory(segments: Iterator[Batch], frames: int, capacity: int, **changes: Any) -> dict[str, float]:
    """What a uniform replay takes that holds so many frames."""
    process = psutil.Process()
    buffer = make("replay", capacity, **changes)
    gc.collect()
    before = process.memory_info().rss
    seconds = fill(buffer, segments, frames)
    gc.collect()
    taken = process.memory_info().rss - before
    said = buffer.nbytes({key: leaf[0] for key, leaf in row().items()})
    return {
        "frames": frames,
        "bytes": taken,
        "frames_themselves": frames * FRAME,
        "ratio": taken / (frames * FRAME),
        "nbytes_said": said,
        "add_us": 1e6 * seconds,
    }


def fastest(call: Callable[[], Any], calls: int, turns: int = 7) -> float:
    """Microseconds of a call."""
    best = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return round(1e6 * best, 1)


def speeds(frames: int) -> Iterator[dict[str, Any]]:
    """Storing one row of 8 environments, and sampling."""
    for name in ("replay", "prioritized", "sequence"):
        for deduplicate, compress in ((True, None), (True, "lz4"), (False, None), (False, "lz4")):
            found: dict[str, Any] = {"buffer": name, "deduplicate": deduplicate, "compress": compress}
            for batch in (32, 256) if name != "sequence" else (32,):  # 256 sequences of 121 rows would be 3.5 GB
                segments = played()
                buffer = make(name, frames, batch, deduplicate=deduplicate, compress=compress)
                carry = {"h": torch.zeros(2, COLUMNS, 512), "c": torch.zeros(2, COLUMNS, 512)}
                whole = (s | {"carry": carry} for s in segments) if name == "sequence" else segments
                found["add_us"] = round(1e6 * fill(buffer, whole, frames), 1)
                with torch.inference_mode():
                    found[f"sample_{batch}_us"] = fastest(buffer.sample, 2 if name == "sequence" else 10)
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--pong", type=int, default=100_000)
    parser.add_argument("--speed", type=int, default=10_000, help="frames of the replays whose speed is measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    raw = memory(made_up(), args.frames, args.frames)
    print(f"{args.frames:,} frames, stacks of {STACK}: {raw['bytes']:,} bytes, {raw['ratio']:.4f} x the frames")
    packed = memory(played(), args.pong, args.pong, compress="lz4")
    whole = packed["bytes"] * 1_000_000 / args.pong
    print(f"Pong, LZ4, {args.pong:,} frames: {packed['bytes']:,} bytes, {packed['ratio']:.4f} x the frames;")
    print(f"extrapolated to 1,000,000 frames: {whole:,.0f} bytes")
    rows = []
    for found in speeds(args.speed):
        rows.append(found)
        print("  ".join(f"{key} {value}" for key, value in found.items()))
    result = {
        "memory": {"raw": raw, "pong_lz4": packed, "pong_lz4_extrapolated_to_1m": whole},
        "columns": COLUMNS,
        "speeds": rows,
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__},
    }
    Path(__file__).with_name("results").joinpath("buffers.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

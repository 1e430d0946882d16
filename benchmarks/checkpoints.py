"""What checkpoints cost: seconds that training waits, seconds of writing, bytes, and the share of training time.

    python benchmarks/checkpoints.py                      # a replay of 1,000,000 transitions
    python benchmarks/checkpoints.py --rows 100000 --rounds 3

SAC with its own networks on observations of 17 numbers and actions of 6 (those of HalfCheetah). The replay is filled
with random rows, then SAC's learner steps go on while checkpoints are written. Speed with and without a checkpoint
being written is measured in turns. Results go to ``results/checkpoints.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlplug import tree
from rlplug.api import Segment
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.run.callbacks import capture
from rlplug.trainer.trainer import Trainer

SEGMENT = 1000


class Wide(gymnasium.Env[np.ndarray, np.ndarray]):
    """Random numbers in the shape of HalfCheetah's."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._row(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._row(), 0.0, False, False, {}

    def _row(self) -> np.ndarray:
        return self.np_random.standard_normal(17).astype(np.float32)


def make(rows: int, folder: Path) -> Trainer:
    gymnasium.register("Wide-v0", Wide, max_episode_steps=1000)
    settings = [f"buffer.capacity={rows}", f"total_steps={2 * rows}", "hardware=cpu", "logger.only=[]"]
    return build(compose(["algo=sac", "env=gymnasium", "env.id=Wide-v0", *settings]), folder)


def fill(trainer: Trainer, rows: int) -> None:
    """Random rows, as quickly as they can be stored."""
    example = tree.map(lambda x: torch.as_tensor(x), trainer.collector.spec.row)
    for _ in range(0, rows, SEGMENT):
        segment = tree.map(lambda x: torch.zeros(SEGMENT + 1, *x.shape, dtype=x.dtype), example)
        for key in ("obs", "action", "reward"):
            segment[key].uniform_(-1.0, 1.0)
        segment["valid"][:-1] = True
        trainer.buffer.add(Segment(segment))
        trainer.progress.env_steps += SEGMENT


def updates(trainer: Trainer, seconds: float | None = None) -> float:
    """Learner steps a second: while a checkpoint is being written, or for ``seconds``."""
    assert trainer.reports.manager is not None
    start, count = time.perf_counter(), 0
    while trainer.reports.manager.busy if seconds is None else time.perf_counter() - start < seconds:
        trainer.learner.update()
        count += 1
    return count / (time.perf_counter() - start)


def size(folder: Path) -> int:
    """Bytes that this checkpoint shares with no other."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1)


def write(trainer: Trainer, undisturbed: float) -> dict[str, float]:
    """One checkpoint, in the background of learner steps."""
    assert trainer.reports.manager is not None
    start = time.perf_counter()
    trainer.reports.manager.submit(capture(trainer))
    waited = time.perf_counter() - start
    speed = updates(trainer)
    wrote = time.perf_counter() - start - waited
    path = trainer.reports.manager.wait()
    assert path is not None
    slowed = max(0.0, 1.0 - speed / undisturbed)
    return {
        "waited_s": waited,
        "writing_s": wrote,
        "slowed": slowed,
        "bytes": size(path),
        "lost_s": waited + slowed * wrote,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7, help="later checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder, closing(make(args.rows, Path(folder))) as trainer:
        every = trainer.config.checkpoint.every
        interval = 60 * float(every.removesuffix("min"))
        trainer.reports.manager = CheckpointManager(Path(folder), trainer.config.checkpoint, 0)
        fill(trainer, args.rows)
        speed = updates(trainer, 3.0)
        first = write(trainer, speed)
        # SAC makes one step of the environment for one of the learner, if collecting took no time
        new = int(np.ceil(speed * interval / SEGMENT)) * SEGMENT
        later = []
        for _ in range(args.rounds):
            fill(trainer, new)
            later.append(write(trainer, updates(trainer, 3.0)))
        medians = {key: statistics.median(round_[key] for round_ in later) for key in first}
    result = {
        "rows": args.rows,
        "updates_per_s": round(speed, 1),
        "first": first,
        "new_rows": new,
        "later": medians,
        "interval_s": interval,
        "share": medians["lost_s"] / interval,
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__},
    }
    Path(__file__).with_name("results").joinpath("checkpoints.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{args.rows:,} transitions; {speed:.0f} learner steps/s undisturbed")
    print(f"{'':<28}{'waited':>10}{'writing':>10}{'slower by':>11}{'bytes':>15}")
    for name, cost in (("first checkpoint", first), (f"later, {new:,} new rows", medians)):
        seconds = f"{cost['waited_s']:>8.3f} s{cost['writing_s']:>8.2f} s"
        print(f"{name:<28}{seconds}{cost['slowed']:>11.0%}{cost['bytes']:>15,}")
    print(f"share of training time at checkpoint.every={every}: {result['share']:.3%}")


if __name__ == "__main__":
    main()

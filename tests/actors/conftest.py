"""One Ray cluster for all tests of this folder, and trainers that are driven step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplug.actors.cluster import connected
from rlplug.config import compose
from rlplug.plan import Plan, RayCluster
from rlplug.run.build import build, start
from rlplug.testing.checks.runs import flat
from rlplug.trainer.trainer import Trainer

NEW = {"address": None, "object_store_memory": None, "num_cpus": 1, "num_gpus": 0, "placement_strategy": "PACK"}
TWO = ("hardware.actors.count=2", "hardware.actors.num_cpus=0.5", "hardware.actors.backoff_s=0.1")


@pytest.fixture(scope="package")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster that exists before the runs, as in a notebook: they join it and leave it running."""
    with connected(Plan(ray=RayCluster(**NEW))) as address:
        yield address


def play(words: tuple[str, ...], updates: int, disturb: Callable[[int, Trainer], None] | None = None) -> dict[str, Any]:
    """Return weights, statistics and counters of a run after ``updates`` updates.

    Args:
        disturb: called before every round.
    """
    with closing(build(compose(words), Path())) as trainer:
        start(trainer)
        loop, progress, rounds = trainer.loop, trainer.progress, 0
        while progress.updates < updates:
            warm = progress.env_steps >= loop.learning_starts
            if disturb is not None:
                disturb(rounds, trainer)
            trainer.policy.normalizer.commit()  # as run.report() does
            trainer.collect("explore" if warm else "random")
            rounds += 1
            due = progress.updates + 1 if loop.replay_ratio is None else loop.updates(progress.env_steps)
            while trainer.ready() and progress.updates < due:
                trainer.update()
        return flat(
            {
                "weights": trainer.algorithm.state_dict(),
                "exploration": {name: extra.state_dict() for name, extra in trainer.policy.exploration.items()},
                "preprocess": trainer.policy.normalizer.state_dict(),
                "progress": vars(progress),
                "finished": trainer.episodes.state()["finished"],
            }
        )


def processes(kind: str = "Actor") -> list[psutil.Process]:
    """Return the processes of this program's actors, in the order in which they were started."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may end now
            if f"ray::{kind}" in " ".join(process.cmdline()[:1]):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())

"""The collector of a rank: of its own environments, or of the first rank's where they do not divide by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gymnasium.vector import AutoresetMode

from rlplug.api import Collector, VecEnv
from rlplug.collection.in_process import InProcessCollector
from rlplug.collection.next_step import NextStepCollector
from rlplug.collection.same_step import SameStepCollector
from rlplug.types import Batch, Tree


def make_collector(env: VecEnv, *args: Any, **kwargs: Any) -> InProcessCollector:
    """Build the collector for the environment's autoreset mode. Arguments: those of ``InProcessCollector``."""
    return (NextStepCollector if env.autoreset is AutoresetMode.NEXT_STEP else SameStepCollector)(env, *args, **kwargs)


class BroadcastCollector:
    """Gives the segments of the first rank's ``own`` collector, None on the others, to every rank."""

    def __init__(self, own: Collector | None, broadcast: Callable[[Any], Any]) -> None:
        self.own, self.broadcast = own, broadcast
        self.bounds = own.bounds if own else None
        self.autoreset = own.autoreset if own else AutoresetMode.NEXT_STEP

    def start(self) -> None:
        if self.own:
            self.own.start()

    def example(self) -> Batch:
        return self.broadcast(self.own.example() if self.own else {})

    def collect(self, *args: Any, **kwargs: Any) -> Iterator[Batch]:
        yield from self.broadcast(list(self.own.collect(*args, **kwargs)) if self.own else [])

    def raw_segment(self, rows: int) -> Batch:
        return self.own.raw_segment(rows) if self.own else {}

    def state(self) -> Tree:
        return self.own.state() if self.own else None

    def load(self, state: Tree) -> None:
        if self.own:
            self.own.load(state)

    def close(self) -> None:
        if self.own:
            self.own.close()

"""Collection where environments do not divide by ranks: the first rank collects, and all of them hold the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from rlplug.api import Collector
from rlplug.types import Batch, Mode, Tree, Weights

if TYPE_CHECKING:
    from rlplug.envs.checking import Bounds


class BroadcastCollector(Collector):
    """Gives the first rank's segments to every rank.

    Args:
        own: the first rank's collector; None on the others.
        broadcast: returns the first rank's argument on every rank.
    """

    def __init__(self, own: Collector | None, broadcast: Callable[[Any], Any]) -> None:
        self.own, self.broadcast = own, broadcast
        self.bounds: Bounds | None = own.bounds if own else None

    @property
    def autoreset(self) -> AutoresetMode:
        return self.own.autoreset if self.own else AutoresetMode.NEXT_STEP

    def start(self) -> None:
        if self.own:
            self.own.start()

    def example(self) -> Batch:
        return self.broadcast(self.own.example() if self.own else {})

    def collect(
        self,
        rows: int,
        weights: Mapping[str, Weights] | None = None,
        tasks: Tree = None,
        stop: Callable[[], bool] | None = None,
        mode: Mode = "explore",
        further: int = 0,
    ) -> Iterator[Batch]:
        own = list(self.own.collect(rows, weights, tasks, stop, mode, further)) if self.own else []
        yield from self.broadcast(own)

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

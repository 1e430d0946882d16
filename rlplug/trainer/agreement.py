"""What all ranks have to do in the same round: stop, and write a checkpoint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from rlplug.trainer.collectives import Placement
from rlplug.types import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GOES_ON = "the run goes on, and says so once (env.check_bounds=false: never)"


class Agreement:
    """Lets the ranks agree after every round on whether to stop and whether to write a checkpoint.

    Args:
        ready_to_save: whether the first rank could write a checkpoint now.
        beyond: where this rank's observations were out of bounds; afterwards those of all ranks.
    """

    def __init__(self, placement: Placement, ready_to_save: Callable[[], bool], beyond: list[str]) -> None:
        self.placement, self.ready_to_save, self.beyond = placement, ready_to_save, beyond
        self.asked = 0  # the signal that asked this process to stop; 0: none did
        self.error: RunError | None = None  # that a logger asked to stop with
        self.stop = 0  # the signal that ends the run, once all ranks know
        self.may_save = False  # whether the first rank can write a checkpoint after this round
        self._told = False  # whether a person was told of observations out of bounds
        self._holds = False  # whether the ranks agreed since the last report

    def request_stop(self, signal_number: int, error: RunError | None = None) -> None:
        """End the run after this round, by the first ``error`` if there is one; 0 takes that back."""
        self.asked, self.error = signal_number, self.error or error
        if self.placement.ranks.world_size == 1:
            self.stop_all(signal_number)

    def stop_all(self, signal_number: int) -> None:
        """End the run after this round; called on all ranks, or 0 takes that back."""
        self.stop = signal_number

    def reach(self, steps: int = 0) -> int:
        """Agree, and return the sum of the environment ``steps`` that every rank collected."""
        ranks = self.placement.ranks
        own = [steps * self.placement.collects, ranks.rank == 0 and self.ready_to_save(), len(self.beyond)]
        steps, may_save, found, *stops = ranks.sums([*own, *(self.asked == number for number in SIGNALS)])
        if found and not self._told:
            self._told = True
            self.beyond[:] = every = [said for rank in ranks.exchange(self.beyond) for said in rank]
            if ranks.rank == 0:
                print(f"rlplug: {every[0]}; {GOES_ON}", file=sys.stderr, flush=True)
        self.may_save, self._holds = bool(may_save), True
        if ranks.world_size > 1:
            self.stop_all(next((number for number, asked in zip(SIGNALS, stops, strict=True) if asked), 0))
        return steps

    def conclude(self) -> None:
        """Agree, unless the ranks have done so since the last call: where the round collected nothing."""
        if not self._holds:
            self.reach()
        self._holds = False

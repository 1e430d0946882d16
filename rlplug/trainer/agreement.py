"""Agreement of all ranks on the round in which to stop or to write a checkpoint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from rlplug.trainer.placement import Placement
from rlplug.types import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GOES_ON = "the run continues and reports this once (env.check_bounds=false: never)"


class Agreement:
    """Agrees with the other ranks after every round on whether to stop and whether to write a checkpoint.

    Args:
        ready_to_save: returns whether rank 0 could write a checkpoint now.
        beyond: this rank's observations out of bounds; those of the other ranks are added.
    """

    def __init__(self, placement: Placement, ready_to_save: Callable[[], bool], beyond: list[str]) -> None:
        self.placement, self.ready_to_save, self.beyond = placement, ready_to_save, beyond
        self.asked = 0  # signal that requested a stop of this process; 0: none
        self.error: RunError | None = None  # error with which a logger requested a stop
        self.stop = 0  # signal that ends the run after this round, equal on all ranks; 0: none
        self.may_save = False  # whether rank 0 can write a checkpoint after this round
        self._told = False  # whether observations out of bounds have been reported
        self._holds = False  # whether the ranks have agreed since the last report

    def request_stop(self, signal_number: int, error: RunError | None = None) -> None:
        """Request to end the run after this round, with the first ``error`` if any; 0 cancels the request."""
        self.asked, self.error = signal_number, self.error or error
        if self.placement.ranks.world_size == 1:
            self.stop = signal_number

    def reach(self, steps: int = 0) -> int:
        """Agree, and return the sum over ranks of collected environment ``steps``."""
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
            self.stop = next((number for number, asked in zip(SIGNALS, stops, strict=True) if asked), 0)
        return steps

    def conclude(self) -> None:
        """Agree, unless the ranks have agreed since the last call; needed after rounds that collect nothing."""
        if not self._holds:
            self.reach()
        self._holds = False

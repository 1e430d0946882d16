"""A ring of batches, each used several times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer import check_feedback
from rlplug.plugins.buffer.segments import Segments
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch


class Circular(Buffer):
    """The circular buffer of IMPACT, Luo et al. 2020 (arXiv:1912.00167), section 3.2: ``N`` batches, each used ``K``
    times.

    A batch consists of the next segments, concatenated along ``B``, with at least ``train_batch_size`` transitions.
    Sampling cycles through the ring whenever it is full. A batch is removed after its last use, or when a new batch
    needs its place and it is the oldest; batches removed with uses left are counted.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"segments"})
    sequences: ClassVar[bool] = False
    repeats: ClassVar[str] = "num_uses"
    size_key: ClassVar[str] = "buffer.num_batches"

    @settings
    class Config:
        num_batches: PositiveInt = option("Batches in the ring, the paper's N; a new one replaces the oldest.")
        num_uses: PositiveInt = option("Number of times each batch is used, the paper's K.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.device = cfg, torch.device("cpu")
        self.segments = Segments(ctx)
        self._waiting: list[int] = []  # numbers of segments that are not a whole batch yet
        self._ring: deque[tuple[list[int], int]] = (
            deque()
        )  # numbers of segments, and uses so far; the next sample first
        self._dropped = 0

    def add(self, segment: Segment) -> None:
        """Copy the segment into the buffer."""
        self._waiting.append(self.segments.add(segment))
        if self.segments.enough(self._waiting) is None:
            return
        if len(self._ring) == self.cfg.num_batches:
            oldest = min(self._ring)
            self._ring.remove(oldest)
            self.segments.forget(oldest[0])
            self._dropped += 1
        self._ring.append((self._waiting, 0))
        self._waiting = []

    def ready(self) -> bool:
        return len(self._ring) == self.cfg.num_batches

    @property
    def warm_up(self) -> int:
        each = -(-self.segments.size // self.segments.width) * self.segments.width
        return self.cfg.num_batches * each

    def sample(self) -> Batch:
        """Return ``[T+1, B]`` with ``version [B]`` and at least ``train_batch_size`` transitions, valid or not."""
        numbers, uses = self._ring.popleft()
        batch = self.segments.read(numbers)
        if uses + 1 < self.cfg.num_uses:
            self._ring.append((numbers, uses + 1))
        else:
            self.segments.forget(numbers)
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Accept no feedback: there are no priorities.

        Raises:
            RunError: ``values`` is not empty.
        """
        check_feedback(self, values, ())

    def metrics(self) -> dict[str, float]:
        """Return the number of batches removed before their last use."""
        return {"dropped_batches": self._dropped}

    def nbytes(self, row: Batch) -> int:
        each = -(-self.segments.size // self.segments.width)
        return self.segments.nbytes(row, (self.cfg.num_batches + 1) * each - 1)

    def save(self, log: RowLog) -> None:
        self.segments.save(log)
        log.state |= {"waiting": [*self._waiting], "ring": [*self._ring], "dropped": self._dropped}

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self._waiting, self._dropped = [*map(int, log.state["waiting"])], int(log.state["dropped"])
        self._ring = deque(([*map(int, numbers)], int(uses)) for numbers, uses in log.state["ring"])
        self.segments.load(log, [*self._waiting, *(number for numbers, _ in self._ring for number in numbers)])

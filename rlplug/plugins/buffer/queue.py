"""A queue of segments, each used once, with optional replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer import check_feedback
from rlplug.plugins.buffer.segments import Segments
from rlplug.settings import NonNegativeFloat, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError


class Queue(Buffer):
    """A FIFO of segments. A sample concatenates the oldest along ``B``, with the ``version`` of each column's weights.

    When the queue is full, the oldest segment is dropped and counted. With ``replay_proportion``, used segments are
    kept for a while, and some of them, sampled uniformly, are added to the new ones (Espeholt et al. 2018,
    arXiv:1802.01561, section 5.2.2). If every rank holds all data, each gets the whole sample.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"segments"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"

    @settings
    class Config:
        capacity: PositiveInt = option("Segments kept; beyond that, the oldest is dropped and counted.")
        replay_proportion: NonNegativeFloat = option("Replayed segments in a sample per new one; 0: none.")
        replay_capacity: PositiveInt = option("Newest used segments kept for replay.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.ctx, self.device = cfg, ctx, torch.device("cpu")
        self.segments = Segments(ctx)
        size, width, columns = self.segments.size, self.segments.width, len(ctx.env_ids) // ctx.num_shards
        if (most := cfg.capacity * width) < size:
            raise ConfigError(
                "buffer.capacity",
                f"{cfg.capacity} segments of {columns} environments hold {most} transitions, and a sample has"
                f" {size}; at least {-(-size // width)} is needed",
            )
        if cfg.replay_proportion and not ctx.needs.off_policy:
            said = "replays data of older policies, which the algorithm does not correct for; use 0"
            raise ConfigError("buffer.replay_proportion", said)
        self._waiting: deque[int] = deque()  # numbers of segments, oldest first
        self._used: deque[int] = deque()
        self._owed = 0.0  # segments to replay
        self._dropped = 0

    def add(self, segment: Segment) -> None:
        """Copy the segment into the queue."""
        self._waiting.append(self.segments.add(segment))
        if len(self._waiting) > self.cfg.capacity:
            self.segments.forget([self._waiting.popleft()])
            self._dropped += 1

    def ready(self) -> bool:
        return self.segments.enough(self._waiting) is not None

    def sample(self) -> Batch:
        """Return ``[T+1, B]`` with ``version [B]`` and at least ``train_batch_size`` new transitions, valid or not."""
        taken = [self._waiting.popleft() for _ in range(self.segments.enough(self._waiting) or 0)]
        batch = self.segments.read([*taken, *self._replayed(len(taken))])
        if self.cfg.replay_proportion:
            self._used.extend(taken)
            taken = [self._used.popleft() for _ in range(len(self._used) - self.cfg.replay_capacity)]
        self.segments.forget(taken)
        return batch

    def _replayed(self, new: int) -> list[int]:
        """Sample used segments, on average ``replay_proportion`` per new one."""
        if not self._used:
            return []
        self._owed += self.cfg.replay_proportion * new
        count = int(self._owed)
        self._owed -= count
        return [self._used[i] for i in self.ctx.randint(len(self._used), count, rows=False, host=True).tolist()]

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Accept no feedback: there are no priorities.

        Raises:
            RunError: ``values`` is not empty.
        """
        check_feedback(self, values, ())

    def metrics(self) -> dict[str, float]:
        """Return the number of dropped segments."""
        return {"dropped_segments": self._dropped}

    def nbytes(self, row: Batch) -> int:
        used = self.cfg.replay_capacity if self.cfg.replay_proportion else 0
        return self.segments.nbytes(row, self.cfg.capacity + used)

    def save(self, log: RowLog) -> None:
        self.segments.save(log)
        log.state |= {"waiting": [*self._waiting], "used": [*self._used], "owed": self._owed, "dropped": self._dropped}

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        state = log.state
        self._waiting, self._used = (deque(int(number) for number in state[key]) for key in ("waiting", "used"))
        self.segments.load(log, [*self._waiting, *self._used])
        self._owed, self._dropped = float(state["owed"]), int(state["dropped"])

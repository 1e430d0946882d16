"""Segments in the order in which they came, each of which is used once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, Data, RowLog, Segment
from rlplug.plugins.buffer.shards import check_feedback
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, ConfigError


class Queue:
    """A FIFO of segments. A sample is the oldest of them, side by side, with the ``version`` of each column's weights.

    A short segment, which ends a run, is padded with ``valid=False``. When the queue is full, the oldest segment is
    dropped, and counted. Where every rank holds all data, a sample is the whole of it on each.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"segments"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"

    @settings
    class Config:
        capacity: PositiveInt = option("Segments kept; when there are more, the oldest is dropped and counted.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.capacity, self.rows, self.device = cfg.capacity, ctx.rollout_length, torch.device("cpu")
        columns = len(ctx.env_ids)
        self.size = ctx.batch_size if columns == ctx.num_envs else ctx.batch_size // ctx.world_size
        if (most := cfg.capacity * self.rows * columns) < self.size:
            least = -(-self.size // (self.rows * columns))
            raise ConfigError(
                "buffer.capacity",
                f"{cfg.capacity} segments of {columns} environments hold {most} transitions, and a sample has"
                f" {self.size}; at least {least} is needed",
            )
        self._segments: deque[tuple[Batch, int]] = deque()
        self._first = 0  # number of the oldest segment
        self._dropped = 0

    def add(self, segment: Segment) -> None:
        """Keep a copy.

        Raises:
            ConfigError: segments of a shard are so small that the queue never holds a sample.
        """
        batch = tree.map(torch.clone, segment.batch)
        if (missing := self.rows + 1 - len(batch["valid"])) > 0:
            batch = tree.map(lambda x: torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]), batch)
        self._segments.append((batch, segment.version))
        if len(self._segments) > self.capacity:
            self._pop()
            self._dropped += 1
        if len(self._segments) == self.capacity and not self.ready():
            raise ConfigError(
                "buffer.capacity",
                f"{self.capacity} segments hold less than the {self.size} transitions of a sample; raise it",
            )

    def _pop(self) -> tuple[Batch, int]:
        self._first += 1
        return self._segments.popleft()

    def _oldest(self) -> int | None:
        """How many of the oldest segments make a sample; None: there are too few."""
        size = 0
        for count, (batch, _) in enumerate(self._segments, 1):
            size += self.rows * batch["valid"].shape[1]
            if size >= self.size:
                return count
        return None

    def ready(self) -> bool:
        return self._oldest() is not None

    def sample(self) -> Batch:
        """``[T+1, B]`` with ``version [B]``; at least ``train_batch_size`` transitions, valid or not."""
        taken = [self._pop() for _ in range(self._oldest() or 0)]
        batch = taken[0][0] if len(taken) == 1 else tree.cat([batch for batch, _ in taken], 1)
        versions = [torch.full((batch["valid"].shape[1],), version) for batch, version in taken]
        return batch | {"version": torch.cat(versions)}

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Refuse all: a segment is used once.

        Raises:
            RunError: something is fed back.
        """
        check_feedback(self, values, ())

    def metrics(self) -> dict[str, float]:
        """Segments that were dropped so far."""
        return {"dropped_segments": self._dropped}

    def nbytes(self, row: Batch) -> int:
        return self.capacity * (self.rows + 1) * sum(leaf.nbytes for leaf in tree.leaves(row))

    def save(self, log: RowLog) -> None:
        """Each segment once, as a row of the log."""
        end = self._first + len(self._segments)
        for number in range(max(self._first, log.end), end):
            batch, _ = self._segments[number - self._first]
            log.append(number, tree.take(batch, None))
        log.trim(self._first)
        versions = [version for _, version in self._segments]
        log.state = {"first": self._first, "versions": versions, "dropped": self._dropped}

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self._first, self._dropped, versions = log.state["first"], log.state["dropped"], log.state["versions"]
        batches = {number + i: tree.take(rows, i) for number, rows in log.rows() for i in range(len(rows["valid"]))}
        self._segments.extend((batches[self._first + i], version) for i, version in enumerate(versions))

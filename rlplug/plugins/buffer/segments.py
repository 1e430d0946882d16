"""Storage of collected segments, by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rlplug import tree
from rlplug.api import Context, RowLog, Segment
from rlplug.types import Batch


class Segments:
    """Copies of segments, numbered in order of arrival; the owner removes them one by one.

    Attributes:
        size: transitions per sample, on this rank.
        width: columns of one segment, the environments of a shard.
    """

    def __init__(self, ctx: Context) -> None:
        self.rows, columns = ctx.rollout_length, len(ctx.env_ids)
        self.size = ctx.batch_size if columns == ctx.num_envs else ctx.batch_size // ctx.world_size
        self.num_shards, self.width = ctx.num_shards, self.rows * (columns // ctx.num_shards)
        self._kept: dict[int, tuple[Batch, int]] = {}  # number -> rows, and the version of the weights
        self._end = 0  # number of the next segment

    def add(self, segment: Segment) -> int:
        """Copy a segment and return its number."""
        self._kept[self._end] = tree.map(torch.clone, segment.batch), segment.version
        self._end += 1
        return self._end - 1

    def enough(self, numbers: Iterable[int]) -> int | None:
        """Return how many of them, from the first on, make a sample; None if there are too few."""
        size = 0
        for count, number in enumerate(numbers, 1):
            size += self.rows * self._kept[number][0]["valid"].shape[1]
            if size >= self.size:
                return count
        return None

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return segments concatenated to ``[T+1, B]``, with the ``version [B]`` of each column's weights."""
        kept = [self._kept[number] for number in numbers]
        versions = [torch.full((batch["valid"].shape[1],), version) for batch, version in kept]
        return tree.cat([batch for batch, _ in kept], 1) | {"version": torch.cat(versions)}

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._kept[number]

    def nbytes(self, row: Batch, count: int) -> int:
        """Return the bytes of ``count`` segments, if ``row`` is a row of all environments."""
        return count * (self.rows + 1) * sum(leaf.nbytes for leaf in tree.leaves(row)) // self.num_shards

    def save(self, log: RowLog) -> None:
        """Write each segment once, as a row of the log; the owner adds its own state to ``log.state``."""
        for number, (batch, _) in self._kept.items():
            if number >= log.end:
                log.append(number, tree.take(batch, None))
        log.trim(min(self._kept, default=self._end))
        log.state = {"end": self._end, "versions": [[number, version] for number, (_, version) in self._kept.items()]}

    def load(self, log: RowLog, numbers: Sequence[int]) -> None:
        """Restore the segments, of which the owner holds ``numbers``.

        Raises:
            ValueError: they have other numbers.
        """
        rows = {first + i: tree.take(batch, i) for first, batch in log.rows() for i in range(len(batch["valid"]))}
        self._end = int(log.state["end"])
        self._kept = {int(number): (rows[number], int(version)) for number, version in log.state["versions"]}
        if sorted(numbers) != sorted(self._kept) or self._end <= max(self._kept, default=-1):
            raise ValueError("the buffer has other segments than those that were saved")

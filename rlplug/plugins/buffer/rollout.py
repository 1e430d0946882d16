"""The on-policy buffer: the segments of one round, given once and whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer import check_feedback
from rlplug.settings import settings
from rlplug.types import Batch


class Rollout(Buffer):
    """Holds ``[T+1, B]`` segments until they are sampled; side by side if there are several."""

    gives: ClassVar[frozenset[Data]] = frozenset({"rollout"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "rollout_fragment_length"

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.rows, self.device = ctx.rollout_length, torch.device("cpu")
        self._segments: list[Batch] = []

    def add(self, segment: Segment) -> None:
        """Keep a copy: a collector writes its next segment into the same memory."""
        self._segments.append(tree.map(torch.clone, segment.batch))

    def ready(self) -> bool:
        return bool(self._segments)

    def sample(self) -> Batch:
        segments, self._segments = self._segments, []
        return segments[0] if len(segments) == 1 else tree.cat(segments, 1)

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Refuse all: a rollout is used once.

        Raises:
            RunError: something is fed back.
        """
        check_feedback(self, values, ())

    def nbytes(self, row: Batch) -> int:
        return (self.rows + 1) * sum(leaf.nbytes for leaf in tree.leaves(row))

    def save(self, log: RowLog) -> None:
        """What a round has collected and was not learned from yet; mostly nothing."""
        log.state = self._segments

    def load(self, log: RowLog) -> None:
        self._segments = log.state or []

"""The on-policy buffer: the segments of one round, returned once."""

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
    """Holds ``[T+1, B]`` segments until they are sampled, concatenated along ``B``."""

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
        """Copy the segment: a collector reuses its memory for the next one."""
        self._segments.append(tree.map(torch.clone, segment.batch))

    def ready(self) -> bool:
        return bool(self._segments)

    def sample(self) -> Batch:
        segments, self._segments = self._segments, []
        return segments[0] if len(segments) == 1 else tree.cat(segments, 1)

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Accept no feedback: there are no priorities.

        Raises:
            RunError: ``values`` is not empty.
        """
        check_feedback(self, values, ())

    def nbytes(self, row: Batch) -> int:
        return (self.rows + 1) * sum(leaf.nbytes for leaf in tree.leaves(row))

    def save(self, log: RowLog) -> None:
        """Save collected segments that were not sampled yet, mostly none."""
        log.state = self._segments

    def load(self, log: RowLog) -> None:
        segments = log.state or []
        if not isinstance(segments, list) or not all(isinstance(one, dict) and "valid" in one for one in segments):
            raise ValueError("the saved buffer is no list of segments")
        self._segments = segments

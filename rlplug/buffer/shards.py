"""A ring for every shard, and checks shared by all buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Context, RowLog, Segment
from rlplug.buffer.options import Storage
from rlplug.buffer.storage import Ring
from rlplug.types import Batch, RunError

R = TypeVar("R", bound=Ring)


class Rings(Generic[R]):
    """The rings of all shards, with ``B`` columns in total. An insertion id is ``row * B + column``.

    Columns are synchronous only within a shard, so each shard has its own row count. A single shard with all columns
    is saved directly; several shards have one part of the log each.

    Args:
        ring: the class of a ring.
        span, stride: see ``Ring``.
    """

    def __init__(self, ring: type[R], cfg: Storage, ctx: Context, span: int, stride: int = 0) -> None:
        self.columns = len(ctx.env_ids)
        self._make = partial(ring, cfg, ctx, span, stride)
        self._full = self._make()  # raises errors before anything is collected
        self.rows, self.device, self.nbytes = self._full.rows, self._full.device, self._full.nbytes
        self._rings: dict[int, R] = {}
        self.read: Callable[[Any, Any, int], Batch] = self._read
        """reads ``length + 1`` rows from ``row [n]`` on, of the columns ``column [n]``; see ``Ring.read``"""

    def __iter__(self) -> Iterator[R]:
        return iter(self._rings.values())

    def of(self, segment: Segment) -> R:
        """Return the ring of a segment's shard.

        Raises:
            RunError: its columns belong to other shards.
        """
        begin, end, _ = segment.columns.indices(self.columns)
        ring = self._rings.get(segment.shard)
        return self._new(segment.shard, begin, end) if ring is None or ring.begin != begin else ring

    def _new(self, shard: int, begin: int, end: int) -> R:
        if any(begin < ring.begin + ring.columns and ring.begin < end for ring in self) or shard in self._rings:
            raise RunError(
                f"shard {shard} now has the environments {begin} to {end - 1} of this process, which were shared out in"
                " another way before; a run with several shards keeps them: resume it with as many actors"
            )
        full = end - begin == self.columns
        ring = self._rings[shard] = self._full if full else self._make(columns=range(begin, end))
        if full:  # the common case: the only shard
            self.read = ring.read
        return ring

    def _read(self, row: Any, column: Any, length: int) -> Batch:
        parts, places = list[Batch](), list[Any]()
        for ring, mine in self.split(column):
            parts.append(ring.read(row[mine], column[mine] - ring.begin, length))
            places.append(mine)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return tree.map(lambda x: x.index_select(1, order.to(x.device)), tree.cat(parts, 1))

    def split(self, column: Any) -> Iterator[tuple[R, Any]]:
        """Yield every ring that has some of the columns ``column [n]``, and their positions in ``column``."""
        for ring in self:
            mine = np.flatnonzero((column >= ring.begin) & (column < ring.begin + ring.columns))
            if len(mine):
                yield ring, mine

    def save(self, log: RowLog) -> None:
        if self._full in self._rings.values():
            self._full.save(log)
            return
        shards: list[dict[str, Any]] = []
        for shard, ring in self._rings.items():
            part = log.part(shard + 1)
            ring.save(part)
            shards.append({"shard": shard, "begin": ring.begin, "end": ring.begin + ring.columns, "ring": part.state})
        if shards:
            log.state = {"shards": shards}

    def load(self, log: RowLog) -> None:
        for of in log.state.get("shards", ()):
            part = log.part(of["shard"] + 1)
            part.state = of["ring"]
            self._new(of["shard"], of["begin"], of["end"]).load(part)
        if not self._rings:
            self._new(0, 0, self.columns).load(log)


def check_feedback(buffer: object, values: Iterable[str], kept: Iterable[str]) -> None:
    """Check that a buffer accepts the keys of its feedback.

    Raises:
        RunError: it does not accept one of them.
    """
    for key in values:
        if key not in kept:
            name = type(buffer).__name__.lower()
            what = f"it takes {' and '.join(kept)}" if kept else "it accepts no feedback"
            raise RunError(f"{key!r} was fed back to the buffer {name}, which does not keep it; {what}")

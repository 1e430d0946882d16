"""The base class of replays: rings of stream rows, and windows of them, for any sampling scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer.episodes import stream
from rlplug.buffer.options import Storage
from rlplug.buffer.shards import Rings, check_feedback
from rlplug.buffer.storage import Ring
from rlplug.types import Batch, RunError

R = TypeVar("R", bound=Ring)


class Windows(Buffer, Generic[R]):
    """Stores the rows of every shard in a ring, and returns windows of ``burn_in + window`` transitions.

    This class handles streams, wrap-around, the open row, shards, images, and incremental checkpoints. A subclass
    defines the windows, and samples them::

        class Newest(Windows[Ring]):
            def __len__(self): ...            # number of windows that can be sampled
            def added(self, ring, first): ... # update the bookkeeping for new rows
            def draw(self): ...               # sample the rows and columns at which windows start

    and, if it changes samples, ``relabel``. A subclass whose bookkeeping cannot be derived from the rows saves it in
    ``log.state`` after ``super().save(log)``.

    Args:
        cfg: options, including those of ``Storage``.
        stride: rows between the starts of two windows; with ``sequences``, each has the recurrent state before it.

    Raises:
        ConfigError: ``buffer.capacity`` is too small for a window and a segment, or images cannot be compressed.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"windows"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"
    keeps: ClassVar[tuple[str, ...]] = ("priority",)
    """feedback keys other than stored ones; a subclass with uniform sampling accepts priorities and ignores them"""
    relabels: ClassVar[frozenset[str]] = frozenset()
    """keys of a window, including ``obs.<part>``, that ``relabel`` may change"""
    ring: ClassVar[type[Ring]] = Ring
    """the class of the rings; a subclass may store its own data per row, see ``Ring.allocate``"""

    Config: ClassVar[type[Any]] = Storage

    def __init__(self, cfg: Storage, ctx: Context, stride: int = 1) -> None:
        self.ctx = ctx
        self.columns = len(ctx.env_ids)
        self.window = ctx.needs.window.rows - 1
        self.batch_size = ctx.batch_size // ctx.world_size
        self._whole: bool | None = None  # whether whole episodes are added; None: nothing was added yet
        ring: Any = self.ring
        self.rings: Rings[R] = Rings(ring, cfg, ctx, self.window + stride - 1, stride if self.sequences else 0)

    @property
    def device(self) -> torch.device:
        """Return the device that stores the rows."""
        return self.rings.device

    def add(self, segment: Segment) -> None:
        """Add a segment: rows 0..T-1 are closed; row T gets its action from the next ``add``.

        Whole episodes of jobs are laid one after another in the columns. Storage is densest for jobs with as many
        episodes as there are columns.

        Raises:
            RunError: the loop both collects and stores jobs; observations are not stacks, although the environment
                declares them; or see ``added``.
        """
        if self._whole not in (None, segment.whole):
            raise RunError("the loop collects, and stores episodes of jobs in the same buffer; it can only do one")
        self._whole = segment.whole
        parts = stream(segment.batch, self.columns, self.ctx.rollout_length) if segment.whole else [segment]
        for part in parts:
            ring = self.rings.of(part)
            first = ring.written
            ring.write(part.batch)
            self.added(ring, first)

    def added(self, ring: R, first: int) -> None:
        """Update the bookkeeping for closed rows ``first`` to ``ring.written - 1`` of a ring; row ``written`` is open.

        Rows before ``ring.oldest`` are dropped. ``load`` also calls it, with all rows of every ring at once.
        """
        raise NotImplementedError(f"{type(self).__name__}.added")

    def __len__(self) -> int:
        """Return the number of windows that can be sampled."""
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def ready(self) -> bool:
        return len(self) > 0

    @property
    def warm_up(self) -> int:
        """Return the environment steps until every column has a complete window."""
        return self.window * self.columns

    def draw(self) -> tuple[Any, Any, Batch]:
        """Sample windows: return their first ``row`` and ``column``, integer arrays ``[B]``, and further keys.

        Further keys are tensors ``[B]``: ``index``, which is ``row * self.columns + column``, ``sample_prob``, and
        ``weight`` for prioritized sampling. Use the generators of ``ctx``, and sample ``self.batch_size`` windows.
        """
        raise NotImplementedError(f"{type(self).__name__}.draw")

    def relabel(self, batch: Batch, row: Any, column: Any) -> None:
        """Change windows ``[burn_in + window + 1, B]`` in place; they start at ``row`` and ``column [B]``.

        They are copies: stored rows do not change. Does nothing by default.
        """

    def sample(self) -> Batch:
        """Return ``[burn_in + window + 1, B]`` with ``index``, ``sample_prob``, and optionally ``weight [B]``."""
        row, column, drawn = self.draw()
        batch = self.rings.read(row, column, self.window)
        self.relabel(batch, row, column)
        batch.update(drawn)
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Ignore priorities, and replace stored keys in the first ``k`` rows of the windows ``index [n]``.

        Args:
            values: leaves ``[k, n, ...]``; of rows in several windows, the last window counts.

        Raises:
            RunError: ``values`` holds a key that is neither in ``keeps`` nor stored, or has another shape.
        """
        stored = {key for ring in self.rings for key in ring.replaceable}
        check_feedback(self, values, (*self.keeps, *sorted(stored.difference(self.keeps))))
        new = {key: x for key, x in values.items() if key in stored and key not in self.keeps}
        if not new:
            return
        row, column = np.divmod(index.cpu().numpy(), self.columns)
        for ring, mine in self.rings.split(column):
            mine = mine[(row[mine] >= ring.first) & (row[mine] + self.window <= ring.written)]
            ring.replace(row[mine], column[mine] - ring.begin, tree.take(new, (slice(None), torch.from_numpy(mine))))

    def nbytes(self, row: Batch) -> int:
        return self.rings.nbytes(row)

    def save(self, log: RowLog) -> None:
        """Save closed rows once, and the open row, which the next ``add`` overwrites, each time."""
        self.rings.save(log)

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self.rings.load(log)
        for ring in self.rings:
            self.added(ring, ring.first)

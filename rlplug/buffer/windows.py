"""The base of replays: rows of streams in rings, and windows of them, whatever these are drawn by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer.options import Storage
from rlplug.buffer.shards import Rings, check_feedback
from rlplug.buffer.storage import Ring
from rlplug.types import Batch

R = TypeVar("R", bound=Ring)


class Windows(Buffer, Generic[R]):
    """Keeps the rows of every shard in a ring, and gives windows of ``burn_in + window`` transitions.

    Streams, wrap-around, the open row, shards, images, and checkpoints that store what is new are done here. A subclass
    says which windows there are, and draws them::

        class Newest(Windows[Ring]):
            def __len__(self): ...            # how many windows may be drawn
            def added(self, ring, first): ... # rows came: keep account of them
            def draw(self): ...               # rows and columns that windows begin with

    and, if it changes what it gives, ``relabel``. A subclass whose account of rows does not follow from the rows
    themselves saves it in ``log.state`` behind ``super().save(log)``.

    Args:
        cfg: options, those of ``Storage`` among them.
        stride: rows between the beginnings of two windows; with ``sequences``, each has the recurrent state before it.

    Raises:
        ConfigError: ``buffer.capacity`` holds no window and a collected segment, or images cannot be compressed.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"windows"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"
    keeps: ClassVar[tuple[str, ...]] = ("priority",)
    """what may be fed back; a subclass that draws uniformly takes priorities and ignores them"""
    relabels: ClassVar[frozenset[str]] = frozenset()
    """keys of a window, ``obs.<part>`` among them, that need not be as they were added"""
    ring: ClassVar[type[Ring]] = Ring
    """the class of a ring, for a subclass that keeps numbers beside rows: see ``Ring.allocate``"""

    Config: ClassVar[type[Any]] = Storage

    def __init__(self, cfg: Storage, ctx: Context, stride: int = 1) -> None:
        self.ctx = ctx
        self.columns = len(ctx.env_ids)
        self.window = ctx.needs.burn_in + ctx.needs.window
        self.batch_size = ctx.batch_size // ctx.world_size
        ring: Any = self.ring
        self.rings: Rings[R] = Rings(ring, cfg, ctx, self.window + stride - 1, stride if self.sequences else 0)

    @property
    def device(self) -> torch.device:
        """Where rows are kept."""
        return self.rings.device

    def add(self, segment: Segment) -> None:
        """Rows 0..T-1 are closed, row T waits for its action at the next ``add``.

        Raises:
            RunError: observations are no stacks, though the environment says so; or see ``added``.
        """
        ring = self.rings.of(segment)
        first = ring.written
        ring.write(segment.batch)
        self.added(ring, first)

    def added(self, ring: R, first: int) -> None:
        """Keep account of the closed rows ``first`` to ``ring.written - 1`` of a ring; row ``written`` is open.

        Rows before ``ring.oldest`` are gone. It is also called after ``load``, with all rows of every ring at once.
        """
        raise NotImplementedError(f"{type(self).__name__}.added")

    def __len__(self) -> int:
        """Return how many windows may be drawn."""
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def ready(self) -> bool:
        return len(self) > 0

    @property
    def warm_up(self) -> int:
        """Return the environment steps before the first window is whole, in every column."""
        return self.window * self.columns

    def draw(self) -> tuple[Any, Any, Batch]:
        """Return what a sample's windows begin with: ``row`` and ``column``, arrays ``[B]`` of integers, and the rest.

        The rest are tensors ``[B]``: ``index``, which is ``row * self.columns + column``, ``sample_prob``, and
        ``weight`` if it draws by priority. Draw with ``ctx``, and ``self.batch_size`` windows.
        """
        raise NotImplementedError(f"{type(self).__name__}.draw")

    def relabel(self, batch: Batch, row: Any, column: Any) -> None:
        """Change windows ``[burn_in + window + 1, B]``, in place, that begin with ``row`` and ``column [B]``.

        They are copies; the rows that are kept stay what they were. Nothing by default.
        """

    def sample(self) -> Batch:
        """``[burn_in + window + 1, B]`` with ``index``, ``sample_prob``, and perhaps ``weight [B]``."""
        row, column, drawn = self.draw()
        batch = self.rings.read(row, column, self.window)
        self.relabel(batch, row, column)
        batch.update(drawn)
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Ignore priorities.

        Raises:
            RunError: something else is fed back than what it ``keeps``.
        """
        check_feedback(self, values, self.keeps)

    def nbytes(self, row: Batch) -> int:
        return self.rings.nbytes(row)

    def save(self, log: RowLog) -> None:
        """Closed rows are stored once; the open row, which the next ``add`` overwrites, each time."""
        self.rings.save(log)

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self.rings.load(log)
        for ring in self.rings:
            self.added(ring, ring.first)

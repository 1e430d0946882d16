"""Prioritized experience replay, proportional (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, RowLog
from rlplug.buffer import Ring, Storage, Windows
from rlplug.functional.priorities import SumTree, importance_weights, proportional
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, RunError


@settings
class Priorities(Storage):
    """Options of buffers that draw by priority."""

    alpha: NonNegativeFloat = option("Exponent of the priorities; 0: uniform sampling.")
    beta: Scheduled[UnitFloat] = option("Exponent of the importance weights.")
    epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
    num_shards: PositiveInt | None = option(
        "Shards of the environments, with equal shares of a sample; null: one per rank."
    )


class Prioritized(Windows[Ring]):
    """Draws windows in proportion to ``(|priority| + epsilon)^alpha``, which the learner feeds back.

    A window that is whole for the first time has the ``priority`` of its first row, where rows have one, and else the
    largest priority so far. Windows that begin with no valid row, are not whole yet, or have lost rows, have weight 0
    in the tree, which is one for all shards of a collector.

    With ``num_shards`` the replay is in several parts, each with the rows of as many environments (Horgan et al. 2018,
    arXiv:1803.00933, keep theirs so). A sample has as many windows of each that has some, in proportion to priorities
    within it, which is also what ``sample_prob`` and ``weight`` tell. Ranks share the parts out.
    """

    Config = Priorities
    prioritizes: ClassVar[bool] = True

    def __init__(self, cfg: Priorities, ctx: Context) -> None:
        self.cfg, self.stride = cfg, self._stride(ctx)
        super().__init__(cfg, ctx, self.stride)
        everything = self.columns == ctx.num_envs  # else other ranks have other data, and draw from that
        self.strata = ctx.batch_size if everything else self.batch_size
        self.first = ctx.rank * self.batch_size if everything else 0
        self.parts = self._parts(everything)
        self.per_part = self.columns // self.parts
        self.beta = ctx.schedule(cfg.beta)
        self.slots = -(-self.rings.rows // self.stride)
        self.max_priority = 1.0
        self._tree: SumTree | None = None
        # windows of each column that are whole, by number: window i begins with row i * stride
        self._low, self._high = np.zeros((2, self.columns), np.int64)
        self._count = np.zeros(self.parts, np.int64)  # those of each part that may be drawn

    def _parts(self, everything: bool) -> int:
        """Return how many parts are in this process."""
        parts, ranks, envs = self.cfg.num_shards, self.ctx.world_size, self.ctx.num_envs
        if parts is None:
            return 1
        if parts < ranks:
            said = f"{parts} is less than the {ranks} ranks, and each has one at least; take {ranks} or more"
            raise ConfigError("buffer.num_shards", said)
        if envs % parts or (parts % ranks and not everything):
            fit = [str(n) for n in range(ranks, envs + 1) if envs % n == 0 and (everything or n % ranks == 0)]
            said = f"{parts} parts cannot be shared equally among num_envs={envs}, and among {ranks} rank(s)"
            raise ConfigError("buffer.num_shards", f"{said}; {' or '.join(fit) or 'null'} can")
        return parts if everything else parts // ranks

    def _stride(self, ctx: Context) -> int:
        """Rows between the beginnings of two windows."""
        return 1

    def _drawable(self, ring: Ring, window: Any) -> Any:
        """Which of the windows with numbers ``window [n]`` may be drawn, ``[n, B]``."""
        return ring.valid[window % ring.rows]

    def added(self, ring: Ring, first: int) -> None:
        """Windows of a shard that lost rows go, windows that are whole by now come.

        Raises:
            RunError: the first priority of one is NaN or infinite.
        """
        sums = self._tree = self._tree or SumTree(self.slots * self.per_part, self.parts)
        own = slice(ring.begin, ring.begin + ring.columns)
        was_low, was_high = int(self._low[ring.begin]), int(self._high[ring.begin])
        low = -(-ring.oldest // self.stride)
        high = max(low, (ring.written - self.window) // self.stride + 1)
        gone = np.arange(was_low, min(low, was_high))
        new = np.arange(max(low, was_high), high)
        if len(gone):
            leaves = self._leaves(ring, gone)
            self._count -= self._by_part(ring, sums[leaves])
            sums.set(leaves.reshape(-1), 0.0)
        if len(new):
            drawable = self._drawable(ring, new)
            weight = self._first_weight(ring, new, drawable)
            self._count += self._by_part(ring, drawable)
            sums.set(self._leaves(ring, new).reshape(-1), np.where(drawable, weight, 0.0).reshape(-1))
        self._low[own], self._high[own] = low, high

    def _by_part(self, ring: Ring, windows: Any) -> Any:
        """Count in each part which of a shard's ``windows [n, B]`` are not zero."""
        if self.parts == 1:  # the usual case, and it runs once per environment step
            return np.count_nonzero(windows)
        part = (ring.begin + np.arange(ring.columns)) // self.per_part
        return np.bincount(part, np.count_nonzero(windows, 0), self.parts).astype(np.int64)

    def _first_weight(self, ring: Ring, window: Any, drawable: Any) -> Any:
        """The weight of windows ``[n]`` that come, ``[n, B]``, or one for all."""
        priority = self._first_priority(ring, window)
        if priority is None:
            return proportional(self.max_priority, self.cfg.alpha, self.cfg.epsilon)
        if not np.isfinite(priority[drawable]).all():
            raise RunError("a first priority that the algorithm gave a row is NaN or infinite")
        return proportional(priority.astype(np.float64), self.cfg.alpha, self.cfg.epsilon)

    def _first_priority(self, ring: Ring, window: Any) -> Any:
        """The priorities that came with windows ``[n]``, ``[n, B]``; None: rows have none."""
        return ring.leaf(("priority",), window) if "priority" in self.ctx.needs.keys else None

    def _leaves(self, ring: Ring, window: Any) -> Any:
        """Where windows ``[n]`` of a shard stand in the tree, ``[n, B]``."""
        return self._leaf(window[:, None], ring.begin + np.arange(ring.columns))

    def _leaf(self, window: Any, column: Any) -> Any:
        assert self._tree is not None
        leaf = window % self.slots * self.per_part + column
        # a column's place in its part, behind the parts before it
        return leaf if self.parts == 1 else leaf + column // self.per_part * (self._tree.stride - self.per_part)

    def __len__(self) -> int:
        return int(self._count.sum())

    def draw(self) -> tuple[Any, Any, Batch]:
        """Draw one of each stratum, with ``weight [B]``."""
        sums, n = self._tree, self.batch_size
        assert sums is not None
        share = (self.first + np.arange(n) + self.ctx.rand(n, host=True).double().numpy()) / self.strata
        part: Any = 0
        count: Any = len(self)
        if self.parts > 1:  # the integer part of a share says which part, the rest where in it
            filled = sums.totals.nonzero()[0]
            which = np.minimum((share * len(filled)).astype(np.int64), len(filled) - 1)
            share, part = share * len(filled) - which, filled[which]
            count = torch.from_numpy(self._count[part])
        leaves = sums.draw(share, part)
        slot, column = np.divmod(leaves - part * sums.stride, self.per_part)
        column += part * self.per_part
        low = self._low[column]
        row = (low + (slot - low) % self.slots) * self.stride
        prob = torch.from_numpy(sums[leaves] / sums.totals[part])
        weight = importance_weights(prob, count, float(self.beta)).float()
        index = torch.from_numpy(row * self.columns + column)
        return row, column, {"index": index, "sample_prob": prob.float(), "weight": weight}

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Take new priorities, and with stored states ``carry``; of windows that are gone, they are ignored.

        Raises:
            RunError: something else is fed back, or a priority is NaN or infinite.
        """
        super().feedback(index, values)
        if self._tree is None:
            return
        row, column = np.divmod(index.cpu().numpy(), self.columns)
        window = row // self.stride
        leaves = self._leaf(window, column)
        here = (window >= self._low[column]) & (window < self._high[column]) & (self._tree[leaves] > 0)
        if "carry" in values:
            for ring, mine in self.rings.split(np.where(here, column, -1)):
                states = tree.take(values["carry"], (slice(None), torch.from_numpy(mine)))
                ring.refresh(row[mine], column[mine] - ring.begin, states)
        if "priority" not in values:
            return
        priority = values["priority"].detach().double().abs().cpu().numpy()
        if not np.isfinite(priority).all():
            raise RunError("a priority that was fed back to the buffer is NaN or infinite")
        if here.any():
            self.max_priority = max(self.max_priority, float(priority[here].max()))
            self._tree.set(leaves[here], proportional(priority[here], self.cfg.alpha, self.cfg.epsilon))

    def nbytes(self, row: Batch) -> int:
        books = 16 * self.columns + 8 * self.parts
        return super().nbytes(row) + SumTree.nbytes(self.slots * self.per_part, self.parts) + books

    def save(self, log: RowLog) -> None:
        """Rows once; what they are drawn by, each time."""
        super().save(log)
        if self._tree is not None:
            weights = [torch.from_numpy(self._tree[self._whole(ring)]) for ring in self.rings]
            log.state |= {"weights": weights if "shards" in log.state else weights[0]}
            log.state |= {"max_priority": self.max_priority}

    def _whole(self, ring: Ring) -> Any:
        """Where the windows of a shard that are whole stand in the tree, ``[n, B]``."""
        return self._leaves(ring, np.arange(self._low[ring.begin], self._high[ring.begin]))

    def load(self, log: RowLog) -> None:
        super().load(log)
        if self._tree is None:
            return
        self.max_priority = log.state["max_priority"]
        weights = log.state["weights"]
        for ring, own in zip(self.rings, weights if "shards" in log.state else [weights], strict=True):
            self._tree.set(self._whole(ring).reshape(-1), own.numpy().reshape(-1))

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
    """Options of buffers that sample by priority."""

    alpha: NonNegativeFloat = option("Exponent of the priorities; 0: uniform sampling.")
    beta: Scheduled[UnitFloat] = option("Exponent of the importance weights.")
    epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
    num_shards: PositiveInt | None = option(
        "Shards of the environments, with equal shares of a sample; null: one per rank."
    )


class Prioritized(Windows[Ring]):
    """Samples windows in proportion to ``(|priority| + epsilon)^alpha``, with priorities from the learner.

    A window's initial priority is the ``priority`` of its first row, if rows have one, else the largest priority so
    far. Windows that do not begin with a valid row, are incomplete, or have lost rows have weight 0 in the sum tree,
    which all shards of a collector share.

    ``num_shards`` splits the replay into parts with equally many environments, as in Horgan et al. 2018
    (arXiv:1803.00933). A sample has equally many windows of each part that is not empty, in proportion to the
    priorities within it; ``sample_prob`` and ``weight`` account for this. The parts are distributed over the ranks.
    """

    Config = Priorities
    prioritizes: ClassVar[bool] = True

    def __init__(self, cfg: Priorities, ctx: Context) -> None:
        self.cfg, self.stride = cfg, self._stride(ctx)
        super().__init__(cfg, ctx, self.stride)
        everything = self.columns == ctx.num_envs  # else ranks sample from their own data
        self.strata = ctx.batch_size if everything else self.batch_size
        self.first = ctx.rank * self.batch_size if everything else 0
        self.parts = self._parts(everything)
        self.per_part = self.columns // self.parts
        self.beta = ctx.schedule(cfg.beta)
        self.slots = -(-self.rings.rows // self.stride)
        self.max_priority = 1.0
        self._tree: SumTree | None = None
        # complete windows of each column, by number: window i begins with row i * stride
        self._low, self._high = np.zeros((2, self.columns), np.int64)
        self._count = np.zeros(self.parts, np.int64)  # windows of each part that can be sampled

    def _parts(self, everything: bool) -> int:
        """Return the number of parts in this process."""
        parts, ranks, envs = self.cfg.num_shards, self.ctx.world_size, self.ctx.num_envs
        if parts is None:
            return 1
        if parts < ranks:
            said = f"{parts} is less than the {ranks} ranks, which need at least one each; use {ranks} or more"
            raise ConfigError("buffer.num_shards", said)
        if envs % parts or (parts % ranks and not everything):
            fit = [str(n) for n in range(ranks, envs + 1) if envs % n == 0 and (everything or n % ranks == 0)]
            said = f"{parts} parts cannot be shared equally among num_envs={envs}, and among {ranks} rank(s)"
            raise ConfigError("buffer.num_shards", f"{said}; use {' or '.join(fit) or 'null'}")
        return parts if everything else parts // ranks

    def _stride(self, ctx: Context) -> int:
        """Return the rows between the starts of two windows."""
        return 1

    def _drawable(self, ring: Ring, window: Any) -> Any:
        """Return which of the windows numbered ``window [n]`` can be sampled, ``[n, B]``."""
        return ring.valid[window % ring.rows]

    def added(self, ring: Ring, first: int) -> None:
        """Remove a shard's windows that lost rows, and add the windows that are now complete.

        Raises:
            RunError: an initial priority is NaN or infinite.
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
        """Count the nonzero elements of a shard's ``windows [n, B]`` in each part."""
        if self.parts == 1:  # the common case, once per environment step
            return np.count_nonzero(windows)
        part = (ring.begin + np.arange(ring.columns)) // self.per_part
        return np.bincount(part, np.count_nonzero(windows, 0), self.parts).astype(np.int64)

    def _first_weight(self, ring: Ring, window: Any, drawable: Any) -> Any:
        """Return the initial weights of windows ``[n]``, ``[n, B]``, or one for all."""
        priority = self._first_priority(ring, window)
        if priority is None:
            return proportional(self.max_priority, self.cfg.alpha, self.cfg.epsilon)
        if not np.isfinite(priority[drawable]).all():
            raise RunError("an initial priority from the algorithm is NaN or infinite")
        return proportional(priority.astype(np.float64), self.cfg.alpha, self.cfg.epsilon)

    def _first_priority(self, ring: Ring, window: Any) -> Any:
        """Return the initial priorities of windows ``[n]``, ``[n, B]``; None if rows have none."""
        return ring.leaf(("priority",), window) if "priority" in self.ctx.needs.keys else None

    def _leaves(self, ring: Ring, window: Any) -> Any:
        """Return the tree indices of a shard's windows ``[n]``, ``[n, B]``."""
        return self._leaf(window[:, None], ring.begin + np.arange(ring.columns))

    def _leaf(self, window: Any, column: Any) -> Any:
        assert self._tree is not None
        leaf = window % self.slots * self.per_part + column
        # a column's position in its part, after the preceding parts
        return leaf if self.parts == 1 else leaf + column // self.per_part * (self._tree.stride - self.per_part)

    def __len__(self) -> int:
        return int(self._count.sum())

    def draw(self) -> tuple[Any, Any, Batch]:
        """Sample one window per stratum, with ``weight [B]``."""
        sums, n = self._tree, self.batch_size
        assert sums is not None
        share = (self.first + np.arange(n) + self.ctx.rand(n, host=True).double().numpy()) / self.strata
        part: Any = 0
        count: Any = len(self)
        if self.parts > 1:  # the integer part of a share is the part, the fraction the position in it
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
        """Set new priorities and, with stored states, ``carry``; values of removed windows are ignored.

        Raises:
            RunError: ``values`` holds anything else, or a priority is NaN or infinite.
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
        """Save rows once, and their priorities each time."""
        super().save(log)
        if self._tree is not None:
            weights = [torch.from_numpy(self._tree[self._nodes(ring)]) for ring in self.rings]
            log.state |= {"weights": weights if "shards" in log.state else weights[0]}
            log.state |= {"max_priority": self.max_priority}

    def _nodes(self, ring: Ring) -> Any:
        """Return the tree indices of a shard's complete windows, ``[n, B]``."""
        return self._leaves(ring, np.arange(self._low[ring.begin], self._high[ring.begin]))

    def load(self, log: RowLog) -> None:
        super().load(log)
        if self._tree is None:
            return
        self.max_priority = log.state["max_priority"]
        weights = log.state["weights"]
        for ring, own in zip(self.rings, weights if "shards" in log.state else [weights], strict=True):
            self._tree.set(self._nodes(ring).reshape(-1), own.numpy().reshape(-1))

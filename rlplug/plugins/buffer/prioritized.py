"""Prioritized experience replay, proportional (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Context, Data, RowLog, Segment
from rlplug.functional.priorities import SumTree, importance_weights, proportional
from rlplug.plugins.buffer.storage import Ring, Storage
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, RunError


@settings
class Priorities(Storage):
    """Options of buffers that draw by priority."""

    alpha: NonNegativeFloat = option("Exponent of the priorities; 0 draws uniformly.")
    beta: Scheduled[UnitFloat] = option("Exponent of the importance weights.")
    epsilon: PositiveFloat = option("Added to every priority, so that none is 0.")


class Prioritized:
    """Draws windows in proportion to ``(|priority| + epsilon)^alpha``, which the learner feeds back.

    A window that is whole for the first time has the largest priority so far. Windows that begin with no valid
    row, are not whole yet, or have lost rows, have weight 0 in the tree.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"windows"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"

    @settings
    class Config(Priorities):
        pass

    def __init__(self, cfg: Priorities, ctx: Context) -> None:
        self.cfg, self.ctx = cfg, ctx
        self.columns = len(ctx.env_ids)
        self.window = ctx.needs.burn_in + ctx.needs.window
        self.batch_size = ctx.batch_size // ctx.world_size
        everything = self.columns == ctx.num_envs  # else other ranks have other data, and draw from that
        self.strata = ctx.batch_size if everything else self.batch_size
        self.first = ctx.rank * self.batch_size if everything else 0
        self.stride = self._stride()
        self.beta = ctx.schedule(cfg.beta)
        self.ring = Ring(cfg, ctx, self.window + self.stride - 1, self.stride if self.sequences else 0)
        self.slots = -(-self.ring.rows // self.stride)
        self.max_priority = 1.0
        self._tree: SumTree | None = None
        self._low = self._high = 0  # windows that are whole, by number: window i begins with row i * stride
        self._count = 0  # those of them that may be drawn

    def _stride(self) -> int:
        """Rows between the beginnings of two windows."""
        return 1

    def _drawable(self, window: Any) -> Any:
        """Which of the windows with numbers ``window [n]`` may be drawn, ``[n, B]``."""
        return self.ring.valid[window % self.ring.rows]

    def add(self, segment: Segment) -> None:
        """Rows 0..T-1 are closed, row T waits for its action at the next ``add``.

        Raises:
            RunError: observations are no stacks, though the environment says so.
        """
        self.ring.write(segment.batch)
        self._move(proportional(self.max_priority, self.cfg.alpha, self.cfg.epsilon))

    def _move(self, weight: Any) -> None:
        """Windows that lost rows go, windows that are whole by now come.

        Args:
            weight: of those that come and may be drawn; a number, or ``[n, B]``.
        """
        tree = self._tree = self._tree or SumTree(self.slots * self.columns)
        low = -(-self.ring.oldest // self.stride)
        high = max(low, (self.ring.written - self.window) // self.stride + 1)
        gone = np.arange(self._low, min(low, self._high))
        new = np.arange(max(low, self._high), high)
        if len(gone):
            leaves = self._leaves(gone).reshape(-1)
            self._count -= int(np.count_nonzero(tree[leaves]))
            tree.set(leaves, 0.0)
        if len(new):
            drawable = self._drawable(new)
            self._count += int(np.count_nonzero(drawable))
            tree.set(self._leaves(new).reshape(-1), np.where(drawable, weight, 0.0).reshape(-1))
        self._low, self._high = low, high

    def _leaves(self, window: Any) -> Any:
        """Where windows ``[n]`` stand in the tree, ``[n, B]``."""
        return (window % self.slots * self.columns)[:, None] + np.arange(self.columns)

    def __len__(self) -> int:
        return self._count

    def ready(self) -> bool:
        return self._count > 0

    def sample(self) -> Batch:
        """``[burn_in + window + 1, B]`` with ``index``, ``sample_prob`` and ``weight [B]``, one a stratum."""
        tree, n = self._tree, self.batch_size
        assert tree is not None
        share = (self.first + np.arange(n) + self.ctx.rand(n).double().cpu().numpy()) / self.strata
        leaves = tree.draw(share)
        slot, column = np.divmod(leaves, self.columns)
        row = (self._low + (slot - self._low) % self.slots) * self.stride
        prob = torch.from_numpy(tree[leaves] / tree.total)
        batch = self.ring.read(row, column, self.window)
        batch["index"] = torch.from_numpy(row * self.columns + column)
        batch["sample_prob"] = prob.float()
        batch["weight"] = importance_weights(prob, self._count, float(self.beta)).float()
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """New priorities; of windows that are gone, they are ignored.

        Raises:
            RunError: a priority is NaN or infinite.
        """
        if "priority" not in values or self._tree is None:
            return
        priority = values["priority"].detach().double().abs().cpu().numpy()
        if not np.isfinite(priority).all():
            raise RunError("a priority that was fed back to the buffer is NaN or infinite")
        row, column = np.divmod(index.cpu().numpy(), self.columns)
        window = row // self.stride
        leaves = window % self.slots * self.columns + column
        here = (window >= self._low) & (window < self._high) & (self._tree[leaves] > 0)
        if here.any():
            self.max_priority = max(self.max_priority, float(priority[here].max()))
            self._tree.set(leaves[here], proportional(priority[here], self.cfg.alpha, self.cfg.epsilon))

    @property
    def device(self) -> torch.device:
        return self.ring.device

    def nbytes(self, row: Batch) -> int:
        return self.ring.nbytes(row) + SumTree.nbytes(self.slots * self.columns)

    def save(self, log: RowLog) -> None:
        """Rows once; what they are drawn by, each time."""
        self.ring.save(log)
        if self._tree is not None:
            weights = self._tree[self._leaves(np.arange(self._low, self._high))]
            log.state |= {"weights": torch.from_numpy(weights), "max_priority": self.max_priority}

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        self.ring.load(log)
        self.max_priority = log.state["max_priority"]
        self._move(log.state["weights"].numpy())

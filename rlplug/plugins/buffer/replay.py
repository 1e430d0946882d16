"""Uniform experience replay over streams of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Context, Store
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, leaves, map_leaves


class Replay:
    """A ring of ``R`` rows by ``B`` columns, sampled uniformly over its valid transitions.

    Row ``i`` of the stream lies at ``i % R``. An observation is stored once: transition ``t`` is
    rows ``t`` and ``t + 1``. The insertion ids of valid rows stand in a list of their own, in order,
    so that a draw is exactly uniform whatever the share of final observations.
    """

    stale: ClassVar[bool] = True

    @settings
    class Config:
        capacity: PositiveInt = option("Rows kept, over all environments.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.ctx = ctx
        self.columns = len(ctx.env_ids)
        self.window = ctx.needs.burn_in + ctx.needs.window
        self.batch_size = ctx.batch_size // ctx.world_size
        self.rows = cfg.capacity // ctx.num_envs + 1
        if self.rows <= self.window + ctx.rows:
            raise ConfigError(
                "buffer.capacity",
                f"{cfg.capacity} keeps {self.rows - 1} rows of each of the {ctx.num_envs} environments, but a sample "
                f"and a collected segment span {self.window + ctx.rows}; "
                f"at least {ctx.num_envs * (self.window + ctx.rows)} is needed",
            )
        self.written = 0
        self._storage: Batch = {}
        self._ids = self._below = np.zeros(0, np.int64)

    def add(self, segment: Batch) -> None:
        """Rows 0..T-1 are closed, row T waits for its action at the next ``add``."""
        valid = segment["valid"][:-1].numpy()
        length = len(valid)
        if not self._storage:
            self._allocate(segment)
        start = self.written % self.rows
        if start + length < self.rows:
            _copy(self._storage, segment, slice(start, start + length + 1))
        else:
            _copy(self._storage, segment, (torch.arange(length + 1) + start) % self.rows)

        below = self._below[start]
        if length == 1:  # the usual case off-policy, and it runs once per environment step
            new = valid[0].nonzero()[0]
            self._below[(start + 1) % self.rows] = below + len(new)
        else:
            new = valid.reshape(-1).nonzero()[0]
            self._below[(start + 1 + np.arange(length)) % self.rows] = below + valid.sum(1).cumsum()
        self._ids[(below + np.arange(len(new))) % len(self._ids)] = self.written * self.columns + new
        self.written += length

    def _allocate(self, like: Batch) -> None:
        self._storage = map_leaves(lambda x: torch.zeros(self.rows, *x.shape[1:], dtype=x.dtype), like)
        self._ids = np.zeros(self.rows * self.columns, np.int64)
        self._below = np.zeros(self.rows, np.int64)  # valid ids in all rows before the one that lies there

    @property
    def _oldest(self) -> int:
        """The first row that is still there."""
        return max(0, self.written - self.rows + 1)

    def _range(self) -> tuple[int, int]:
        """Which valid ids, counted from the beginning of the run, may be drawn: [low, high)."""
        if not self.written:
            return 0, 0
        newest = max(self._oldest, self.written - self.window + 1)
        return int(self._below[self._oldest % self.rows]), int(self._below[newest % self.rows])

    def __len__(self) -> int:
        low, high = self._range()
        return high - low

    def ready(self) -> bool:
        return len(self) > 0

    def sample(self) -> Batch:
        """``[window + 1, B]`` with ``index [B]``; every first row is valid."""
        low, high = self._range()
        drawn = self.ctx.randint(high - low, self.batch_size).cpu().numpy()
        ids = self._ids[(low + drawn) % len(self._ids)]
        row, column = np.divmod(ids, self.columns)
        places = (row + np.arange(self.window + 1)[:, None]) % self.rows * self.columns + column
        flat = torch.from_numpy(places.reshape(-1))
        shape = places.shape
        batch = map_leaves(lambda x: x.flatten(0, 1).index_select(0, flat).view(*shape, *x.shape[2:]), self._storage)
        batch["index"] = torch.from_numpy(ids)
        batch["prob"] = torch.full((self.batch_size,), 1.0 / (high - low))
        return batch

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Uniform replay has no priorities."""

    def nbytes(self, row: Batch) -> int:
        return self.rows * (sum(leaf.nbytes for leaf in leaves(row)) + 8 * self.columns + 8)

    def handle(self) -> Replay:
        return self

    def save(self, store: Store) -> None:
        """Closed rows are stored once; the open row, which the next ``add`` overwrites, each time."""
        if not self._storage:
            return
        start = max(self._oldest, store.end)
        while start < self.written:
            at = start % self.rows
            length = min(self.written - start, self.rows - at)
            store.append(start, map_leaves(lambda x: x[at : at + length], self._storage))  # noqa: B023
            start += length
        store.trim(self._oldest)
        store.state = {
            "written": self.written,
            "open": map_leaves(lambda x: x[self.written % self.rows], self._storage),
        }

    def load(self, store: Store) -> None:
        if store.state is None:
            return
        self.written = store.state["written"]
        for start, rows in store.rows():
            if not self._storage:
                self._allocate(rows)
            # rows before the oldest one lie where newer ones follow
            _copy(self._storage, rows, (torch.arange(len(rows["valid"])) + start) % self.rows)
        _copy(self._storage, store.state["open"], self.written % self.rows)

        rows = np.arange(self._oldest, self.written + 1)
        valid = self._storage["valid"].numpy()[rows[:-1] % self.rows]
        self._below[rows % self.rows] = np.concatenate([[0], valid.sum(1).cumsum()])  # counted from the oldest row
        new = valid.reshape(-1).nonzero()[0]
        self._ids[: len(new)] = self._oldest * self.columns + new


def _copy(storage: Batch, segment: Batch, where: Any) -> None:
    for key, leaf in segment.items():
        if isinstance(leaf, dict):
            _copy(storage[key], leaf, where)
        else:
            storage[key][where] = leaf

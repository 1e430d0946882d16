"""Environments that do not keep in lock step, in the learner's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlplug.collection.next_step import NextStepCollector
from rlplug.collection.segment import copied, on_host, only, pad, put, put_at, row_of, take
from rlplug.types import Batch, Mode, Tree


class SameStepCollector(NextStepCollector):
    """``NextStepCollector`` for vector environments that reset an ended column within the step that ends it.

    Such a column gets two rows from one call, its final observation and the next episode's first
    one, so every column has a cursor of its own. A segment ends when the first column is full; the
    others are padded with ``valid=False``, and their open row begins the next segment.
    """

    def begin(self, tasks: Tree = None) -> None:
        super().begin(tasks)
        self._fresh: Batch | None = None  # first observations that had no room behind a final row T
        self._beyond = np.zeros(self.columns, np.bool_)

    def state(self) -> Tree:
        return super().state() | {"fresh": self._fresh, "beyond": self._beyond}

    def load(self, state: Tree) -> None:
        self._check_own(state)
        if not self._open:
            self.begin()
        self._fresh, self._beyond = state["fresh"], state["beyond"]
        super().load(state)

    def _cut(self) -> None:
        self._fresh = copied(self._anew())
        self._fresh |= {key: np.zeros_like(self._open[key]) for key in self.memory}
        self._beyond = np.ones(self.columns, np.bool_)

    def _collect(self, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        store = self._rows.get(rows) or self._rows.setdefault(rows, self._allocate(rows + 2))
        tensors, arrays = store.tensors, store.arrays
        observed = [key for key in self._seen if key not in (*self.memory, "is_first")]
        every = np.arange(self.columns)
        arrays["valid"][:], arrays["is_first"][:] = False, False
        put(arrays, 0, self._open)
        at = np.zeros(self.columns, np.int64)
        if self._fresh is not None:
            self._first(arrays, np.ones_like(at), every, self._fresh, self._beyond)
            at[self._beyond] = 1
            self._fresh, self._beyond = None, np.zeros_like(self._beyond)
        arrays["valid"][at, every] = True
        while at.max() < rows and not (stop is not None and stop()):
            now = take({key: arrays[key] for key in self._seen}, (at, every))
            if self.carries:
                put(arrays["carry"], (at, every), on_host(self.carry))
            host = on_host(only(self._act(now, mode), arrays))
            put(arrays, (at, every), host)
            result = self._step(host["action"])
            put(arrays, (at, every), {key: result[key] for key in ("reward", "terminated", "truncated")})
            ended = result["terminated"] | result["truncated"]
            fresh = {key: result[key] for key in observed}
            last = fresh
            if ended.any():
                finals = {"obs": "final_obs", "action_mask": "final_action_mask"}
                last = fresh | {key: result[final] for key, final in finals.items() if final in result}
            last |= {key: result["reward"] if key == "prev_reward" else host["action"] for key in self.memory}
            put(arrays, (at + 1, every), last)
            if self.carries:
                put(arrays["carry"], (at + 1, every), on_host(self.carry))
            if ended.any() and self.closes:
                self._close(arrays, at + 1, every, last, ended, mode)
            fresh |= {key: np.zeros_like(last[key]) for key in self.memory}
            self._first(arrays, at + 2, every, fresh, ended)
            at = at + 1 + ended
            arrays["valid"][np.minimum(at, rows), every] |= at <= rows
            self._beyond = at > rows
            self._fresh = copied(fresh) if self._beyond.any() else None
        row = np.minimum(at, rows)
        arrays["valid"][row, every] = False
        if self.carries:
            put(arrays["carry"], (row, every), on_host(self.carry))
        for column in np.flatnonzero(at < rows):
            for key in (*self._seen, *(("carry",) if self.carries else ())):
                pad(arrays[key], int(at[column]), rows, int(column))
        self._open = copied(take({key: arrays[key] for key in self._seen}, (row, every)))
        self._open["valid"] = ~self._beyond
        if self.closes and mode != "random":
            self._close(arrays, row, every, {key: self._open[key] for key in self._seen}, ~self._beyond, mode)
        return {key: row_of(leaf, slice(0, rows + 1)) for key, leaf in tensors.items()}

    def _first(self, arrays: Batch, at: Any, every: Any, fresh: Batch, where: Any) -> None:
        """Write the first observations of the columns ``where``."""
        columns = every[where]
        for key, leaf in fresh.items():
            put_at(arrays[key], at[where], columns, leaf)
        arrays["is_first"][at[where], columns] = True

    def _close(self, arrays: Batch, at: Any, every: Any, row: Batch, where: Any, mode: Mode) -> None:
        """What the algorithm says (its value) of rows on which it does not act: final and open ones."""
        out, _ = self._decide(self._tensors({"is_first": np.zeros(self.columns, np.bool_)} | row), mode)
        for key, value in on_host(only(out, arrays)).items():
            put_at(arrays[key], at[where], every[where], value)

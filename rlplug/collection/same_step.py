"""Collection from environments that reset an ended episode within the same step (``AutoresetMode.SAME_STEP``)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rlplug import tree
from rlplug.collection.segment import SegmentMemory, copied, only, to_array
from rlplug.collection.shard import ShardCollector
from rlplug.types import Batch, Mode, Tree


class SameStepCollector(ShardCollector):
    """Collects two rows from a step that ends an episode: its final observation, and the next episode's first one.

    So every environment has a row of its own that is written next. A segment ends when the first environment has all
    its rows; the others are padded with ``valid=False``, and their open row begins the next segment.
    """

    extra_rows = 2

    def reset(self, tasks: Tree = None) -> None:
        super().reset(tasks)
        self._first: Batch | None = None  # first observations that had no room behind a final row T
        self._final = np.zeros(self.num_envs, np.bool_)  # where they are: the open row is a final observation

    def state(self) -> Tree:
        return super().state() | {"fresh": self._first, "beyond": self._final}

    def load(self, state: Tree) -> None:
        super().load(state)
        if state["env"] is not None:
            own: Batch = {"beyond": self._final}
            tree.check_like(own, only(state, own), "collector", exact=True)
            self._final, self._first = to_array(state["beyond"]), None
            if self._final.any():
                own = {"fresh": only(self._open, (*self._observed, *self._no_previous))}
                tree.check_like(own, only(state, own), "collector", exact=True)
                self._first = tree.map(to_array, state["fresh"])

    def _restart(self, first: Batch) -> None:
        self._first, self._final = copied(first | self._no_previous), np.ones(self.num_envs, np.bool_)

    def _play(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        arrays, envs = memory.arrays, np.arange(self.num_envs)
        inputs = {key: arrays[key] for key in self._inputs}
        arrays["valid"][:], arrays["is_first"][:] = False, False
        tree.put(arrays, 0, self._open)
        if self._first is not None:
            self._write_first(arrays, np.ones_like(envs), self._first, self._final)
        at = self._final.astype(np.int64)  # the row that each environment acts on
        arrays["valid"][at, envs] = True
        self._first, self._final = None, np.zeros_like(self._final)
        while at.max() < rows and not (stop is not None and stop()):
            now, following = (at, envs), (at + 1, envs)
            self._write_carry(arrays, now)
            self._write_output(arrays, now, self._act(tree.map(torch.from_numpy, tree.take(inputs, now)), mode))
            result = self._step(arrays["action"][now])
            tree.put(arrays, now, only(result, ("reward", "terminated", "truncated")))
            ended = result["terminated"] | result["truncated"]
            first = {key: result[key] for key in self._observed}
            finals = {key: result[f"final_{key}"] for key in first if f"final_{key}" in result} if ended.any() else {}
            tree.put(arrays, following, first | finals)
            self._write_previous(arrays, now, following)
            self._write_carry(arrays, following)
            if ended.any():
                self._write_value(arrays, following, mode, ended)
            first |= self._no_previous
            self._write_first(arrays, at + 2, first, ended)
            at = at + 1 + ended
            arrays["valid"][np.minimum(at, rows), envs] |= at <= rows
            self._final = at > rows
            self._first = copied(first) if self._final.any() else None
        last = np.minimum(at, rows), envs
        arrays["valid"][last] = False
        self._write_carry(arrays, last)
        padded = only(arrays, (*inputs, "carry"))
        for env in np.flatnonzero(at < rows):
            tree.put(padded, (slice(at[env] + 1, rows + 1), env), tree.take(padded, (at[env], env)))
        self._open = copied(tree.take(inputs, last)) | {"valid": ~self._final}
        if mode != "random":
            self._write_value(arrays, last, mode, ~self._final)
        return tree.take(memory.tensors, slice(0, rows + 1))

    def _write_first(self, arrays: Batch, rows: np.ndarray, first: Batch, where: np.ndarray) -> None:
        """Write first observations into ``rows [B]`` of the environments ``where [B]``."""
        index = rows[where], np.flatnonzero(where)
        tree.put(arrays, index, tree.take(first, where))
        arrays["is_first"][index] = True

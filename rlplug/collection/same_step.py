"""Collection from environments that reset an ended episode within the same step (``AutoresetMode.SAME_STEP``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlplug import tree
from rlplug.collection.segment import SegmentMemory, chosen, copied, only
from rlplug.collection.shard import ShardCollector
from rlplug.types import Batch, Tree


class SameStepCollector(ShardCollector):
    """Collects two rows from a step that ends an episode: its final observation, and the next episode's first one.

    So every environment has a row of its own that is written next. A segment ends when the first environment has all
    its rows; the others are padded with ``valid=False``, and their open row begins the next segment.
    """

    extra_rows = 2

    def reset(self, tasks: Tree = None, seeds: Sequence[int] | None = None) -> None:
        super().reset(tasks, seeds)
        self._first: Batch | None = None  # first observations that had no room behind a final row T
        self._final = np.zeros(self.num_envs, np.bool_)  # where they are: the open row is a final observation

    def state(self) -> Tree:
        return super().state() | {"fresh": self._first, "beyond": self._final}

    def load(self, state: Tree) -> None:
        super().load(state)
        if state["env"] is not None:
            self._first, self._final = state["fresh"], state["beyond"]

    def _restart(self, first: Batch) -> None:
        self._first, self._final = copied(first | self._layout.previous), np.ones(self.num_envs, np.bool_)

    def _play(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> Batch:
        arrays, envs, acting = memory.arrays, np.arange(self.num_envs), self.acting
        arrays["valid"][:], arrays["is_first"][:] = False, False
        tree.put(arrays, 0, self._open)
        if self._first is not None:
            self._write_first(arrays, np.ones_like(envs), self._first, self._final)
        at = self._final.astype(np.int64)  # the row that each environment acts on
        arrays["valid"][at, envs] = True
        self._first, self._final = None, np.zeros_like(self._final)
        while at.max() < rows and not (stop is not None and stop()):
            now, following = (at, envs), (at + 1, envs)
            memory.write(now, {"carry": acting.carry})
            memory.write(now, acting(tree.map(torch.from_numpy, tree.take(memory.seen, now))))
            result = self._step(arrays["action"][now])
            tree.put(arrays, now, chosen(self._layout.result, result))
            ended = result["terminated"] | result["truncated"]
            first = {key: result[key] for key in self._layout.observed}
            finals = {key: result[f"final_{key}"] for key in first if f"final_{key}" in result} if ended.any() else {}
            tree.put(arrays, following, first | finals)
            memory.write_previous(now, following)
            memory.write(following, {"carry": acting.carry})
            if ended.any():
                self._write_value(memory, following, ended)
            first |= self._layout.previous
            self._write_first(arrays, at + 2, first, ended)
            at = at + 1 + ended
            arrays["valid"][np.minimum(at, rows), envs] |= at <= rows
            self._final = at > rows
            self._first = copied(first) if self._final.any() else None
        last = np.minimum(at, rows), envs
        arrays["valid"][last] = False
        memory.write(last, {"carry": acting.carry})
        padded = memory.seen | only(arrays, ("carry",))
        for env in np.flatnonzero(at < rows):
            tree.put(padded, (slice(at[env] + 1, rows + 1), env), tree.take(padded, (at[env], env)))
        self._open = copied(tree.take(memory.seen, last)) | {"valid": ~self._final}
        self._write_value(memory, last, ~self._final)
        return tree.take(memory.tensors, slice(0, rows + 1))

    def _write_first(self, arrays: Batch, rows: np.ndarray, first: Batch, where: np.ndarray) -> None:
        """Write first observations into ``rows [B]`` of the environments ``where [B]``."""
        index = rows[where], np.flatnonzero(where)
        tree.put(arrays, index, tree.take(first, where))
        arrays["is_first"][index] = True

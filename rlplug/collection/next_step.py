"""Collection from environments that reset an ended episode with the next step (``AutoresetMode.NEXT_STEP``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.collection.segment import SegmentMemory, copied
from rlplug.collection.shard import CORE, ShardCollector
from rlplug.types import Batch, Mode


class NextStepCollector(ShardCollector):
    """Collects one row of every environment with each step: all environments have as many rows."""

    def _play(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        tensors, arrays = memory.tensors, memory.arrays
        tree.put(arrays, 0, self._open)
        inputs = {key: tensors[key] for key in self._inputs}
        observed = [(key, arrays[key]) for key in self._observed]
        action, reward = arrays["action"], arrays["reward"]
        terminated, truncated = arrays["terminated"], arrays["truncated"]
        is_first, valid = arrays["is_first"], arrays["valid"]
        end = rows
        for t in range(rows):
            if stop is not None and stop():
                end = t
                break
            self._write_carry(arrays, t)
            self._write_output(arrays, t, self._act(tree.take(inputs, t), mode))
            result = self._step(action[t])
            reward[t] = result["reward"]
            terminated[t] = result["terminated"]
            truncated[t] = result["truncated"]
            if "restarted" in result:  # the row's observation is the last one of an episode that broke off
                valid[t] &= ~result["restarted"]
                self.failed_episodes += int(result["restarted"].sum())
            np.logical_not(valid[t], out=is_first[t + 1])
            np.logical_or(terminated[t], truncated[t], out=valid[t + 1])
            np.logical_not(valid[t + 1], out=valid[t + 1])
            for key, leaf in observed:
                tree.put(leaf, t + 1, result[key])
            self._write_previous(arrays, t, t + 1)
        self._open = copied(tree.take({key: arrays[key] for key in (*self._inputs, "valid")}, end))
        if end < rows:
            tree.put(arrays, slice(end + 1, rows + 1), self._open)
        self._write_carry(arrays, slice(end, rows + 1))
        valid[end:] = False
        if mode != "random":
            self._write_value(arrays, end, mode)
        return tensors

    def _restart(self, first: Batch) -> None:
        first = first | {key: np.zeros(self.num_envs, CORE[key]) for key in ("reward", "terminated", "truncated")}

        def step(action: Any) -> Batch:
            self._step = self.env.step
            return first

        self._step = step

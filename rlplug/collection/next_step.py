"""Collection from environments that reset an ended episode with the next step (``AutoresetMode.NEXT_STEP``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.collection.segment import SegmentMemory, as_it_is, copied, merged
from rlplug.collection.shard import RESULT, ShardCollector
from rlplug.types import Batch, Mode


class NextStepCollector(ShardCollector):
    """Collects one row of every environment with each step: all environments have as many rows."""

    def _play(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        if not self._records or self._eager or stop is not None:
            return self._play_rows(memory, rows, mode, stop)
        self._rollout = memory, rows
        found = self._call(self._play_rollout, {"open": self._open, "carry": self.carry, "noise": self.noise}, rows)
        self._open, self.carry, self.noise = found["open"], found["carry"], found["noise"]
        return memory.tensors

    def _play_rollout(self, batch: Batch) -> Batch:
        """Play a rollout into ``_rollout``'s memory; what it begins with and leaves open are tensors."""
        self._open, self.carry, self.noise = batch["open"], batch["carry"], batch["noise"]
        self._eager = True  # a recording has no other in it
        self._play_rows(*self._rollout, "explore", None)
        self._eager = False
        return {"open": self._open, "carry": self.carry, "noise": self.noise}

    def _play_rows(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        tensors, arrays = memory.tensors, memory.arrays
        tree.put(arrays, 0, self._open)
        has_agents = self.has_agents
        if not memory.rows:
            inputs = self._seen(tensors)
            memory.rows += [tree.take(inputs, t) for t in range(rows)]
        observed = [(key, arrays[key]) for key in self._observed if key not in self.nested]
        action: Any = {name: arrays[name]["action"] for name in self.nested} or arrays["action"]
        reward, terminated, truncated = (arrays.get(key, arrays) for key in RESULT)  # several groups have their own
        is_first, valid, either, negated = arrays["is_first"], arrays["valid"], self.np.logical_or, self.np.logical_not
        end = rows
        for t in range(rows):
            if stop is not None and stop():
                end = t
                break
            self._write_carry(arrays, t)
            self._write_output(arrays, t, self._act(tree.map(as_it_is, memory.rows[t]), mode))
            result = self._step(tree.take(action, t) if has_agents else action[t])
            if has_agents:
                self._write_agents(arrays, t, result)
            else:
                reward[t] = result["reward"]
                terminated[t] = result["terminated"]
                truncated[t] = result["truncated"]
                either(terminated[t], truncated[t], out=valid[t + 1])
                negated(valid[t + 1], out=valid[t + 1])
            if "restarted" in result:  # the row's observation is the last one of an episode that broke off
                valid[t] &= ~result["restarted"]
                self.failed_episodes += int(result["restarted"].sum())
            negated(valid[t], out=is_first[t + 1])
            for key, leaf in observed:
                tree.put(leaf, t + 1, result[key])
            self._write_previous(arrays, t, t + 1)
        # as views: their memory is written again only after the next segment has begun with them
        self._open = tree.take(self._seen(arrays), end) | {"valid": copied(valid[end])}
        if end < rows:
            tree.put(arrays, slice(end + 1, rows + 1), self._open)
        self._write_carry(arrays, slice(end, rows + 1))
        valid[end:] = False
        if mode != "random":
            self._write_value(arrays, end, mode)
        return tensors

    def _write_agents(self, arrays: Batch, t: int, result: Batch) -> None:
        """Write what followed from the actions of row ``t``; somebody acts on the next row where an agent is alive."""
        pairs = [(arrays[name], result[name]) for name in self.nested] or [(arrays, result)]
        for part, given in pairs:
            for key in RESULT:
                part[key][t] = given[key]
        for name in self.nested:
            for key in self._observed[name]:
                tree.put(arrays[name][key], t + 1, result[name][key])
        alive = [given["alive"].reshape(self.num_envs, -1).any(1) for _, given in pairs]
        np.logical_or.reduce(alive, out=arrays["valid"][t + 1])

    def _restart(self, first: Batch) -> None:
        first = merged(first, self._no_result)

        def step(action: Any) -> Batch:
            self._step = self.env.step
            return first

        self._step = step

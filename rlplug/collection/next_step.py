"""Collection from environments that reset an ended episode with the next step (``AutoresetMode.NEXT_STEP``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.collection.segment import RESULT, SegmentMemory, as_it_is, chosen, copied, merged
from rlplug.collection.shard import ShardCollector
from rlplug.types import Batch, groups_of


class NextStepCollector(ShardCollector):
    """Collects one row of every environment with each step: all environments have as many rows."""

    def _play(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> Batch:
        if self._recorder is None or stop is not None or not self.acting.trains:
            self._play_rows(memory, rows, stop)
            return memory.tensors
        self._rollout = memory, rows
        found = self._recorder.call(self._play_rollout, {"open": self._open} | self.acting.state(), rows)
        self._open = found["open"]
        self.acting.load(found)
        return memory.tensors

    def _play_rollout(self, batch: Batch) -> Batch:
        """Play a rollout into ``_rollout``'s memory; what it begins with and leaves open are tensors."""
        self._open = batch["open"]
        self.acting.load(batch)
        self._play_rows(*self._rollout, None)
        return {"open": self._open} | self.acting.state()

    def _play_rows(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> None:
        arrays, has_agents, nested = memory.arrays, self.ctx.spec.has_agents, self.ctx.spec.nested
        tree.put(arrays, 0, self._open)
        action: Any = {name: arrays[name]["action"] for name in nested} or arrays["action"]
        reward, terminated, truncated = (arrays.get(key, arrays) for key in RESULT)  # several groups have their own
        is_first, valid, observed = arrays["is_first"], arrays["valid"], self._layout.observed
        lib: Any = np if isinstance(valid, np.ndarray) else torch
        end = rows
        for t in range(rows):
            if stop is not None and stop():
                end = t
                break
            memory.write(t, {"carry": self.acting.carry})
            memory.write(t, self.acting(tree.map(as_it_is, memory.rows[t])))
            result = self._step(tree.take(action, t) if has_agents else action[t])
            if has_agents:  # the next row is acted on where an agent is alive
                tree.put(arrays, t, chosen(self._layout.result, result))
                alive = [part["alive"].reshape(self.num_envs, -1).any(1) for part in groups_of(result).values()]
                np.logical_or.reduce(alive, out=valid[t + 1])
            else:
                reward[t] = result["reward"]
                terminated[t] = result["terminated"]
                truncated[t] = result["truncated"]
                lib.logical_or(terminated[t], truncated[t], out=valid[t + 1])
                lib.logical_not(valid[t + 1], out=valid[t + 1])
            if "restarted" in result:  # the row's observation is the last one of an episode that broke off
                valid[t] &= ~result["restarted"]
                self.failed_episodes += int(result["restarted"].sum())
            lib.logical_not(valid[t], out=is_first[t + 1])
            tree.put(arrays, t + 1, chosen(observed, result))
            memory.write_previous(t, t + 1)
        # as views: their memory is written again only after the next segment has begun with them
        self._open = tree.take(memory.seen, end) | {"valid": copied(valid[end])}
        if end < rows:
            tree.put(arrays, slice(end + 1, rows + 1), self._open)
        memory.write(slice(end, rows + 1), {"carry": self.acting.carry})
        valid[end:] = False
        self._write_value(memory, end)

    def _restart(self, first: Batch) -> None:
        first = merged(first, self._layout.result)

        def step(action: Any) -> Batch:
            self._step = self.env.step
            return first

        self._step = step

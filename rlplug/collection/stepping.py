"""Collectors for the two autoreset modes: reset with the next step, or within the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.collection.segment import RESULT, SegmentMemory, as_it_is
from rlplug.collection.shard import ShardCollector
from rlplug.host import copied, to_array
from rlplug.types import Batch, ConfigError, Tree, groups_of


def make_shard(env: VecEnv, *args: Any, **kwargs: Any) -> ShardCollector:
    """Build the collector for the environment's autoreset mode, with the arguments of ``ShardCollector``."""
    on_device = env.traits.device is not None
    if on_device and env.spec.has_agents:
        raise ConfigError("env", "has agents and a device; environments with agents must return host arrays")
    if env.autoreset is AutoresetMode.NEXT_STEP:
        return NextStepCollector(env, *args, **kwargs)
    if env.spec.has_agents or on_device:
        whose = "a device" if on_device else "agents"
        said = f"has {whose}, and resets within the step that ends an episode"
        raise ConfigError("env", f"{said}; environments with {whose} must reset one later (AutoresetMode.NEXT_STEP)")
    return SameStepCollector(env, *args, **kwargs)


class NextStepCollector(ShardCollector):
    """Collects one row per step from every environment."""

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
        """Play a rollout into the memory of ``_rollout``; its first and its open row are tensors."""
        self._open = batch["open"]
        self.acting.load(batch)
        self._play_rows(*self._rollout, None)
        return {"open": self._open} | self.acting.state()

    def _play_rows(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> None:
        arrays, has_agents, nested = memory.arrays, self.ctx.spec.has_agents, self.ctx.spec.nested
        has_carry = "carry" in arrays
        tree.put(arrays, 0, self._open)
        action: Any = {name: arrays[name]["action"] for name in nested} or arrays["action"]
        reward, terminated, truncated = (arrays.get(key, arrays) for key in RESULT)  # of groups: nested
        is_first, valid, observed = arrays["is_first"], arrays["valid"], self._layout.observed
        lib: Any = np if isinstance(valid, np.ndarray) else torch
        end = rows
        for t in range(rows):
            if stop is not None and stop():
                end = t
                break
            if has_carry:
                memory.write(t, {"carry": self.acting.carry})
            memory.write(t, self.acting(tree.map(as_it_is, memory.rows[t])))
            result = self._step(tree.take(action, t) if has_agents else action[t])
            if has_agents:  # the next row has an action if an agent is alive
                tree.put(arrays, t, tree.chosen(self._layout.result, result))
                alive = [part["alive"].reshape(self.num_envs, -1).any(1) for part in groups_of(result).values()]
                np.logical_or.reduce(alive, out=valid[t + 1])
            else:
                reward[t] = result["reward"]
                terminated[t] = result["terminated"]
                truncated[t] = result["truncated"]
                lib.logical_or(terminated[t], truncated[t], out=valid[t + 1])
                lib.logical_not(valid[t + 1], out=valid[t + 1])
            if "restarted" in result:  # the row's observation is the last one of an interrupted episode
                valid[t] &= ~result["restarted"]
                self.failed_episodes += int(result["restarted"].sum())
            lib.logical_not(valid[t], out=is_first[t + 1])
            tree.put(arrays, t + 1, tree.chosen(observed, result))
            memory.write_previous(t, t + 1)
        # as views: the next segment begins before they are overwritten
        self._open = tree.take(memory.seen, end) | {"valid": copied(valid[end])}
        if end < rows:
            tree.put(arrays, slice(end + 1, rows + 1), self._open)
        if has_carry:
            memory.write(slice(end, rows + 1), {"carry": self.acting.carry})
        valid[end:] = False
        self._write_value(memory, end)

    def _restart(self, first: Batch) -> None:
        first = tree.merged(first, self._layout.result)

        def step(action: Any) -> Batch:
            self._step = self.env.step
            return first

        self._step = step


class SameStepCollector(ShardCollector):
    """Collects two rows from a step that ends an episode: the final observation and the next first one.

    Environments therefore differ in their number of rows. A segment ends when the first environment has all its rows;
    the others are padded with ``valid=False``, and their open row begins the next segment.
    """

    extra_rows = 2

    def reset(self, tasks: Tree = None, seeds: Sequence[int] | None = None) -> None:
        super().reset(tasks, seeds)
        self._first: Batch | None = None  # first observations that did not fit after a final row T
        self._final = np.zeros(self.num_envs, np.bool_)  # columns with such an observation; open row is final

    def state(self) -> Tree:
        return super().state() | {"fresh": self._first, "beyond": self._final}

    def load(self, state: Tree) -> None:
        super().load(state)
        if state["env"] is not None:
            own: Batch = {"beyond": self._final}
            tree.check_like(own, tree.only(state, own), "collector", exact=True)
            self._final, self._first = to_array(state["beyond"]), None
            if self._final.any():
                own = {"fresh": tree.only(self._open, (*self._layout.observed, *self._layout.previous))}
                tree.check_like(own, tree.only(state, own), "collector", exact=True)
                self._first = tree.map(to_array, state["fresh"])

    def _restart(self, first: Batch) -> None:
        self._first, self._final = copied(first | self._layout.previous), np.ones(self.num_envs, np.bool_)

    def _play(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> Batch:
        arrays, envs, acting = memory.arrays, np.arange(self.num_envs), self.acting
        arrays["valid"][:], arrays["is_first"][:] = False, False
        tree.put(arrays, 0, self._open)
        if self._first is not None:
            self._write_first(arrays, np.ones_like(envs), self._first, self._final)
        at = self._final.astype(np.int64)  # current row of each environment
        arrays["valid"][at, envs] = True
        self._first, self._final = None, np.zeros_like(self._final)
        while at.max() < rows and not (stop is not None and stop()):
            now, following = (at, envs), (at + 1, envs)
            memory.write(now, {"carry": acting.carry})
            memory.write(now, acting(tree.map(torch.from_numpy, tree.take(memory.seen, now))))
            result = self._step(arrays["action"][now])
            tree.put(arrays, now, tree.chosen(self._layout.result, result))
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
        padded = memory.seen | tree.only(arrays, ("carry",))
        for env in np.flatnonzero(at < rows):
            tree.put(padded, (slice(at[env] + 1, rows + 1), env), tree.take(padded, (at[env], env)))
        self._open = copied(tree.take(memory.seen, last)) | {"valid": ~self._final}
        self._write_value(memory, last, ~self._final)
        return tree.take(memory.tensors, slice(0, rows + 1))

    def _write_first(self, arrays: Batch, rows: np.ndarray, first: Batch, where: np.ndarray) -> None:
        """Write first observations to ``rows [B]`` of the environments ``where [B]``."""
        index = rows[where], np.flatnonzero(where)
        tree.put(arrays, index, tree.take(first, where))
        arrays["is_first"][index] = True

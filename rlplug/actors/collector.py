"""Collection by Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Collector
from rlplug.context import ResolvedRun
from rlplug.trainer.policy import Policy
from rlplug.types import Batch, ConfigError, Mode, Progress, Tree, Weights

if TYPE_CHECKING:
    from rlplug.actors.handle import ActorHandle, Request
    from rlplug.actors.pool import ActorPool
    from rlplug.envs.checking import Bounds


class RayCollector(Collector):
    """Collects with this rank's actors, and returns the segment that one process would have collected.

    The tensors of a segment belong to this collector and are valid until the next ``collect``.

    Args:
        policy: the learner's.
        env_ids: the environments of this rank.
        count: number of actors, which share the environments equally.
        first: number of the first of them in the whole run.
    """

    def __init__(
        self, policy: Policy, resolved: ResolvedRun, progress: Progress, env_ids: Sequence[int], count: int, first: int
    ) -> None:
        assert resolved.plan.actors is not None
        self.policy, self.resolved, self.cfg, self.progress = policy, resolved, resolved.plan.actors, progress
        share = len(env_ids) // count
        self.env_ids, self.first = env_ids, first
        self.shares = [env_ids[i * share : (i + 1) * share] for i in range(count)]
        self.pool: ActorPool | None = None
        self._buffers: dict[int, Batch] = {}  # one segment for each number of rows
        self._last_row: Tree = None
        self._requested = 0  # rounds that were requested and not gathered yet
        self._weights: Any = None
        self._version = -1  # of the weights that were last broadcast
        self._rounds, self._steps = 0, 0  # since that broadcast; steps of one actor
        self._loaded: list[Tree] | None = None
        with closing(policy.collector(env_ids[:1])) as probe:
            self.bounds: Bounds | None = probe.bounds
            self._autoreset = probe.autoreset
            self._row = tree.map(lambda x: x.repeat(len(env_ids), *(1 for _ in x.shape[1:])), probe.example())

    @property
    def autoreset(self) -> AutoresetMode:
        return self._autoreset

    def example(self) -> Batch:
        return self._row

    def raw_segment(self, rows: int) -> Batch:
        return {}  # actors check their own segments

    def start(self) -> None:
        """Start the actors on the cluster that this process is connected to.

        Raises:
            ConfigError: the actors cannot run as configured.
        """
        from rlplug.actors.pool import ActorPool  # imports Ray, which reads the environment then

        self.pool = ActorPool(self.cfg, self.shares, self.resolved, self.first)
        if self._loaded is not None:
            self.pool.load(self._loaded)

    def collect(
        self,
        rows: int,
        weights: Mapping[str, Weights] | None = None,
        tasks: Tree = None,
        stop: Callable[[], bool] | None = None,
        mode: Mode = "explore",
        further: int = 0,
    ) -> Iterator[Batch]:
        assert self.pool is not None
        ahead = min(self.cfg.max_requests_in_flight - 1, further) if mode == "explore" else 0
        while self._requested < 1 + ahead:
            self.pool.request(self._request(self.pool, rows, mode))
            self._requested += 1
        segment = self._gather(self.pool, rows)
        self._requested -= 1
        self.policy.merge_exploration([handle.state for handle in self.pool.alive])
        yield segment

    def _request(self, pool: ActorPool, rows: int, mode: Mode) -> Request:
        """Return a round with the newest weights, or with those of the last broadcast while they are recent enough."""
        from rlplug.actors.handle import Request

        self._rounds, self._steps = self._rounds + 1, self._steps + rows * len(self.shares[0])
        delay = self.cfg.max_weight_sync_delay
        due = self._rounds >= self.cfg.broadcast_interval or (delay is not None and self._steps >= delay)
        if self._weights is None or (due and self._version != self.progress.updates):
            self._weights = pool.put(self.policy.acting_weights())
            self._version, self._rounds, self._steps = self.progress.updates, 0, 0
        statistics = self.policy.statistics() | {"env_steps": self.progress.env_steps}
        return Request(rows, mode, statistics, self._version, self._weights)

    def _gather(self, pool: ActorPool, rows: int) -> Batch:
        """Return one segment ``[T+1, B]`` with the columns of all actors; those of lost actors have no valid rows."""
        if rows not in self._buffers:
            self._buffers[rows] = tree.map(lambda x: x.repeat(rows + 1, *(1 for _ in x.shape)), self._row)
        segment, missing = self._buffers[rows], np.ones(len(self.env_ids), np.bool_)
        for handles, part in pool.gather():
            columns = self._columns(handles)
            missing[columns] = False
            _write(segment, columns, part)
            del part  # so that Ray can reuse its memory for the next one
        if missing.any():
            if self._last_row is not None:  # row 0 is the observation after the last step
                _write(segment, missing, tree.map(lambda x: x[None, missing], self._last_row))
            for key in ("valid", "is_first", "terminated", "truncated", "reward"):
                segment[key][:, torch.from_numpy(missing)] = 0
        if self.cfg.on_failure == "ignore":
            self._last_row = tree.map(lambda x: x[-1].numpy().copy(), segment)
        return segment

    def _columns(self, handles: Sequence[ActorHandle]) -> Any:
        """Return the columns of some actors: a slice where they are contiguous, which is faster to write."""
        columns = np.concatenate([np.asarray(handle.env_ids) for handle in handles]) - self.env_ids[0]
        contiguous = columns[-1] - columns[0] < len(columns)
        return slice(columns[0], columns[-1] + 1) if contiguous else columns

    def state(self) -> Tree:
        """Return the state of every actor after the last segment; ``env`` is None if environments cannot be saved."""
        states = [handle.state for handle in self.pool.handles] if self.pool else self._loaded or []
        saved = all(state["collector"]["env"] is not None for state in states)
        return {"actors": states, "env": "actors" if saved else None}

    def load(self, state: Tree) -> None:
        """Continue from ``state``.

        Raises:
            ConfigError: it has another number of actors.
        """
        states = state.get("actors", [])
        if len(states) != len(self.shares):
            count = f"{len(states)} actors per rank" if states else "no actors"
            raise ConfigError(
                "hardware.actors.count",
                f"the run has been collected with {count} and has to continue so; now it has {len(self.shares)}",
            )
        self._loaded = states
        if self.pool is not None:
            self.pool.load(states)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def _write(segment: Batch, columns: Any, part: Batch) -> None:
    """Write arrays ``[T+1, b, ...]`` into some columns of ``segment [T+1, B, ...]``."""

    def write(leaf: torch.Tensor, values: np.ndarray) -> None:
        leaf.numpy()[:, columns] = values

    tree.map(write, segment, part)

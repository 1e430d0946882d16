"""Collection by Ray actors, as one collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    from rlplug.actors.pool import Crew, Member, Request
    from rlplug.envs.checking import Bounds


class RayCollector(Collector):
    """The segments of this rank's actors, put side by side: what one process would have collected.

    The tensors of a segment are this collector's own memory, valid until the next ``collect``.

    Args:
        policy: the learner's.
        env_ids: the environments of this rank.
        count: actors that share them, equally.
        first: number of the first of these actors in the whole run.
    """

    def __init__(
        self,
        policy: Policy,
        resolved: ResolvedRun,
        progress: Progress,
        env_ids: Sequence[int],
        count: int,
        first: int,
    ) -> None:
        assert resolved.plan.actors is not None
        self.policy, self.resolved, self.cfg, self.progress = policy, resolved, resolved.plan.actors, progress
        share = len(env_ids) // count
        self.env_ids, self.first = env_ids, first
        self.shares = [env_ids[i * share : (i + 1) * share] for i in range(count)]
        self.crew: Crew | None = None
        self._rows: dict[int, Batch] = {}
        self._last: Tree = None
        self._weights: Any = None
        self._version, self._rounds, self._steps = -1, 0, 0
        self._asked = 0
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
        return {}  # actors look for themselves

    def start(self) -> None:
        """Make the actors; Ray is there.

        Raises:
            ConfigError: they cannot be made.
        """
        from rlplug.actors.pool import Crew  # Ray is loaded once it is known how its cluster is spoken to

        self.crew = Crew(self.cfg, self.shares, self.resolved, self.first)
        if self._loaded is not None:
            self._give(self.crew, self._loaded)

    def _give(self, crew: Crew, states: Sequence[Tree]) -> None:
        for member, state in zip(crew.members, states, strict=True):
            crew.load(member, state)

    def collect(
        self,
        rows: int,
        weights: Mapping[str, Weights] | None = None,
        tasks: Tree = None,
        stop: Callable[[], bool] | None = None,
        mode: Mode = "explore",
        further: int = 0,
    ) -> Iterator[Batch]:
        assert self.crew is not None
        ahead = min(self.cfg.max_requests_in_flight - 1, further) if mode == "explore" else 0
        while self._asked < 1 + ahead:
            self.crew.ask(self._request(rows, mode))
            self._asked += 1
        segment = self._together(rows, self.crew.gather())
        self._asked -= 1
        self.policy.merge_exploration([member.state for member in self.crew.members if not member.lost])
        yield segment

    def _request(self, rows: int, mode: Mode) -> Request:
        """A round with the newest weights, or with those of the last broadcast if that is recent enough."""
        self._rounds, self._steps = self._rounds + 1, self._steps + rows * len(self.shares[0])
        delay = self.cfg.max_weight_sync_delay
        due = self._rounds >= self.cfg.broadcast_interval or (delay is not None and self._steps >= delay)
        if self._weights is None or (due and self._version != self.progress.updates):
            assert self.crew is not None
            self._weights = self.crew.put(self.policy.acting_weights())
            self._version, self._rounds, self._steps = self.progress.updates, 0, 0
        from rlplug.actors.pool import Request

        statistics = self.policy.statistics() | {"env_steps": self.progress.env_steps}
        return Request(rows, mode, statistics, self._version, self._weights)

    def _together(self, rows: int, pieces: Iterable[tuple[Sequence[Member], Batch]]) -> Batch:
        """One segment of all columns. Those of lost actors hold nothing that is valid."""
        if rows not in self._rows:
            self._rows[rows] = tree.map(lambda x: x.repeat(rows + 1, *(1 for _ in x.shape)), self._row)
        segment, start, seen = self._rows[rows], self.env_ids[0], np.zeros(len(self.env_ids), np.bool_)
        arrays = tree.map(torch.Tensor.numpy, segment)
        for members, part in pieces:
            columns = np.concatenate([np.asarray(member.env_ids) for member in members]) - start
            seen[columns] = True
            whole = slice(columns[0], columns[-1] + 1) if columns[-1] - columns[0] < len(columns) else columns
            tree.put(arrays, (slice(None), whole), part)
            del part  # Ray can take its room for the next one
        if not seen.all():
            if self._last is not None:  # row 0 is what the last step before led to
                tree.put(arrays, (slice(None), ~seen), tree.take(self._last, (None, ~seen)))
            for key in ("valid", "is_first", "terminated", "truncated", "reward"):
                segment[key][:, torch.from_numpy(~seen)] = 0
        if self.cfg.on_failure == "ignore":
            self._last = tree.map(lambda x: x[-1].numpy().copy(), segment)
        return segment

    def state(self) -> Tree:
        """Every actor's, behind the last segment; ``env`` is None where environments cannot say theirs."""
        states = [member.state for member in self.crew.members] if self.crew else self._loaded or []
        known = all(state["collector"]["env"] is not None for state in states)
        return {"actors": states, "env": "actors" if known else None}

    def load(self, state: Tree) -> None:
        """Raises:
        ConfigError: it is of other actors.
        """
        states = state.get("actors", [])
        if len(states) != len(self.shares):
            there = f"{len(states)} actors to a rank" if states else "none"
            raise ConfigError(
                "hardware.actors.count",
                f"the run was collected by {there}, and continues with as many; here are {len(self.shares)}",
            )
        self._loaded = states
        if self.crew is not None:
            self._give(self.crew, states)

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()

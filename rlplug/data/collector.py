"""A recording is a collector: its episodes come as the segments that environments would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Algorithm, Collector, Job, Rollout, Segment, SegmentSpec
from rlplug.collection.segment import on_cpu, only
from rlplug.collection.shard import CORE
from rlplug.context import EnvShard, RunContext
from rlplug.data.recording import Recording
from rlplug.types import Batch, ConfigError, RunError, Tree, Weights, groups_of

PREVIOUS = ("prev_action", "prev_reward", "agent_is_first")
DERIVED = ("carry", *PREVIOUS, "priority")  # keys that follow from the others


def previous_of(part: Batch, key: str) -> np.ndarray:
    """Return what the rows ``[L+1, ...]`` of an episode have of the rows before them, under one of ``PREVIOUS``."""
    values = part["alive" if key == "agent_is_first" else key.removeprefix("prev_")]
    if (alive := part.get("alive")) is not None:  # nobody acted for the others
        acted = alive.reshape(*alive.shape, *(1 for _ in values.shape[alive.ndim :]))
        values = np.where(acted, values, np.zeros_like(values))
    before = np.concatenate((np.zeros_like(values[:1]), values[:-1]))
    return part["alive"] & ~before if key == "agent_is_first" else before


class Column:
    """Where a column stands: in a pass, in the order of its episodes, and at the row that the next segment begins with.

    Column ``b`` of ``B`` has the episodes ``b, b + B, ...`` of every pass.
    """

    def __init__(self, recording: Recording, number: int, count: int, once: bool) -> None:
        self.recording, self.number, self.count, self.once = recording, number, count, once
        self.at = (0, number, 0)  # pass, place in its order, row of the episode
        self._open: tuple[tuple[int, int], Batch] = ((-1, -1), {})  # the episode that it stands in

    def take(self, rows: int, keys: Sequence[str], previous: Sequence[str]) -> Batch:
        """Return the next rows ``[rows, ...]``, the last of which comes again with the next call.

        Args:
            keys: what is read.
            previous: of ``PREVIOUS``, those that are added.
        """
        pieces, missing = list[Batch](), rows
        while True:
            number, place, row = self.at
            episode = self._episode(keys, previous)
            piece = tree.take(episode, slice(row, row + missing))
            pieces.append(piece)
            missing -= (taken := len(piece["valid"]))
            if not missing:
                self.at = number, place, row + taken - 1
                break
            following = self._following(number, place)
            if following is None:  # its final observation is repeated
                self.at = number, place, row + taken - 1
                last = tree.take(episode, slice(-1, None))
                last["is_first"] = np.zeros(1, np.bool_)
                pieces.append(tree.map(lambda x: np.repeat(x, missing, 0), last))  # noqa: B023
                break
            self.at = *following, 0
        return pieces[0] if len(pieces) == 1 else tree.cat(pieces)

    def _episode(self, keys: Sequence[str], previous: Sequence[str]) -> Batch:
        *where, _ = self.at
        if self._open[0] != (*where,):
            number = int(self.recording.order(where[0])[where[1]])
            episode = dict(self.recording.episode(number, keys, 2 * self.count))
            for name, part in groups_of(episode).items() if previous else ():
                own = part | {key: previous_of(part, key) for key in previous}
                episode |= {name: own} if name else own
            self._open = (where[0], where[1]), episode
        return self._open[1]

    def _following(self, number: int, place: int) -> tuple[int, int] | None:
        """Return pass and place of the next episode; None: there is no more."""
        if place + self.count < len(self.recording.order(number)):
            return number, place + self.count
        if self.once:
            return None
        number += 1
        while self.number >= len(self.recording.order(number)):  # by weights, passes have more or fewer episodes
            number += 1
        return number, self.number


class MixedCollector(Collector):
    """Recorded columns, and beside them those that are played: together one shard, and segments of both."""

    def __init__(self, recorded: RecordingCollector, played: Collector) -> None:
        self.parts: tuple[Collector, ...] = (recorded, played)
        self.columns = slice(0, sum(part.spec.shards[0].stop for part in self.parts))

    @cached_property
    def spec(self) -> SegmentSpec:
        recorded, played = (part.spec for part in self.parts)
        return replace(played, row=tree.cat([recorded.row, played.row]), shards=(self.columns,))

    @property
    def in_flight(self) -> Sequence[int | None]:
        return self.parts[0].in_flight

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        for part in self.parts:
            part.submit(rollout)

    def poll(self, shards: int | None = None) -> list[Segment]:
        (recorded,), (played,) = (part.poll() for part in self.parts)
        return [replace(played, batch=tree.cat([recorded.batch, on_cpu(played.batch)], 1), columns=self.columns)]

    def play(self, jobs: Sequence[Job], weights: Mapping[str, Weights]) -> Iterator[tuple[Job, Batch]]:
        return self.parts[1].play(jobs, weights)

    def state(self) -> Tree:
        recorded, played = (part.state() for part in self.parts)
        return {"env": played["env"], "recorded": recorded, "played": played}

    def load(self, state: Tree) -> None:
        for part, name in zip(self.parts, ("recorded", "played"), strict=True):
            part.load(state[name])

    def close(self) -> None:
        for part in self.parts:
            part.close()


class RecordingCollector(Collector):
    """Gives the episodes of a recording, one behind another in every column, as what environments gave.

    Nothing is played, and what ``mode`` says of a rollout does not matter. ``env_steps`` of the run are steps read.

    Args:
        shard: its columns, and how many there are over all ranks.
        once: it ends after one pass; otherwise passes follow each other.
        preprocess: what the learner sees of a segment, for first priorities.

    Raises:
        ConfigError: a column is missing that the algorithm needs, or the columns get no episode each.
    """

    def __init__(
        self,
        recording: Recording,
        algorithm: Algorithm,
        ctx: RunContext,
        shard: EnvShard,
        once: bool,
        preprocess: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.recording, self.algorithm, self.ctx, self.shard, self.once = recording, algorithm, ctx, shard, once
        self.preprocess = preprocess or (lambda batch: batch)
        self.kept = (*ctx.needs.keys, *CORE, "alive")
        if (n := len(recording.order(0))) < shard.num_envs:
            raise ConfigError("num_envs", f"{shard.num_envs} columns, but the recording has {n} episodes; take 1")
        if not ctx.spec.nested:
            self._missing(key for key in (*CORE, "obs", "action") if key not in recording.keys)
        changes = type(algorithm).postprocess is not Algorithm.postprocess
        self._read = [key for key in recording.keys if changes or key in (*self.kept, *ctx.spec.nested)]
        self.columns = [Column(recording, number, shard.num_envs, once) for number in shard.env_ids]
        self._ready: list[Segment] = []
        _ = self.spec  # what is missing, or of other spaces, is found now

    def _missing(self, keys: Iterable[str]) -> None:
        """Raise ``ConfigError`` for keys that the algorithm needs and nobody gives."""
        given = {*DERIVED} if self.ctx.spec.has_masks else {*DERIVED, "action_mask"}
        if missing := [key for key in keys if key not in given]:
            sources = self.recording.sources
            lacking = next((source for source in sources if missing[0] not in source.keys), sources[0])
            said = f"{lacking.path} has no column {missing[0]!r}, which the algorithm learns from"
            raise ConfigError("data.path", f"{said}; it has {', '.join(sorted(lacking.keys))}")

    @cached_property
    def spec(self) -> SegmentSpec:
        before = [column.at for column in self.columns]
        try:
            row = tree.take(batch := self._segment(1), 0)
        except KeyError as error:  # from ``postprocess``
            self._missing([str(error.args[0])])
            raise
        given = {*batch}.union(*(batch[name] for name in self.ctx.spec.nested))
        self._missing(key for key in self.ctx.needs.keys if key not in given)
        for column, at in zip(self.columns, before, strict=True):
            column.at = at
        every, rows = slice(0, len(self.columns)), self.recording.lengths[self.recording.order(0)] + 1
        most = max(int(rows[b :: self.shard.num_envs].sum()) for b in range(self.shard.num_envs))
        return SegmentSpec(row, AutoresetMode.NEXT_STEP, (every,), steps=self.recording.steps(), rows=most)

    @property
    def in_flight(self) -> Sequence[int | None]:
        return [len(self._ready)]

    def start(self) -> None:
        """Do nothing: files are open already."""

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        columns = slice(0, len(self.columns))
        batch = self._segment(rollout.num_steps)
        self._ready.append(Segment(batch, columns, 0, rollout.version, rollout.version_steps))

    def poll(self, shards: int | None = None) -> list[Segment]:
        return [self._ready.pop(0)]

    def play(self, jobs: Sequence[Job], weights: Mapping[str, Weights]) -> Iterator[tuple[Job, Batch]]:
        raise RunError("a recording plays no jobs; a loop that plays needs an environment: data.path=null")

    def _segment(self, steps: int) -> Batch:
        previous = [key for key in PREVIOUS if key in self.ctx.needs.keys]
        columns = [column.take(steps + 1, self._read, previous) for column in self.columns]
        arrays = tree.map(lambda *leaves: np.stack(leaves, 1), *columns)
        arrays["valid"][-1] = False
        batch = tree.map(torch.from_numpy, arrays)
        if "carry" in self.ctx.needs.keys:  # states of another policy mean nothing to this one
            states = self.algorithm.initial_carry(len(self.columns))
            batch["carry"] = tree.map(lambda x: x.cpu()[None].repeat(steps + 1, *[1] * x.ndim), states)
        with torch.inference_mode(), self.ctx.acting(self.shard):
            batch = self.algorithm.postprocess(batch)
            if "priority" in self.ctx.needs.keys and "priority" not in batch:
                seen = tree.map(lambda x: x.to(self.ctx.device), self.preprocess(only(batch, self.kept, ())))
                first = torch.where(seen["valid"][:-1], self.algorithm.initial_priorities(seen), 0.0)
                batch["priority"] = torch.cat((first, first.new_zeros(1, first.shape[1]))).cpu()
        return only(batch, self.kept, self.ctx.spec.nested)

    def state(self) -> Tree:
        return {"env": "recording", "data": self.recording.identity(), "columns": [[*c.at] for c in self.columns]}

    def load(self, state: Tree) -> None:
        """Go on at the rows of ``state``.

        Raises:
            ConfigError: the files are others than they were.
        """
        if state["data"] != (now := self.recording.identity()):
            changed = next((old[0] for old in state["data"] if old not in now), "there are more files")
            raise ConfigError("data.path", f"is other data than the run began with: {changed}")
        for column, at in zip(self.columns, state["columns"], strict=True):
            column.at = tuple(at)

    def close(self) -> None:
        """Do nothing: files close themselves."""

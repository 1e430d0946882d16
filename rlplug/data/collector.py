"""Collectors of recorded episodes, as segments like those of environments."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Algorithm, SegmentSpec
from rlplug.collection.finishing import Transform, finished, transforms
from rlplug.collection.segment import CORE
from rlplug.collection.shard import ShardCollector
from rlplug.context import EnvShard, ResolvedRun, RunContext
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.functional.previous import BEGINS, PREVIOUS, write_previous
from rlplug.host import on_cpu
from rlplug.types import Batch, ConfigError, Tree, groups_of

DERIVED = ("carry", *PREVIOUS, "priority")  # keys derived from others


def with_previous(episode: Batch, keys: Sequence[str]) -> Batch:
    """Add ``keys`` of ``PREVIOUS``, derived from the previous row, to the rows ``[L+1, ...]`` of an episode."""
    for name, part in groups_of(episode).items():
        source = {key: part["alive" if key == BEGINS else key.removeprefix("prev_")] for key in keys}
        own = part | tree.map(np.zeros_like, source)
        if BEGINS in own:
            own[BEGINS][0] = part["alive"][0]
        write_previous(own, episode["valid"], slice(0, -1), slice(1, None))
        episode = episode | ({name: own} if name else own)
    return episode


class Cursor:
    """Position in a dataset: pass, place in the order of its episodes, and first row of the next segment.

    Column ``b`` of ``B`` has the episodes ``b, b + B, ...`` of every pass.
    """

    def __init__(self, recording: Recording, number: int, count: int, once: bool) -> None:
        self.recording, self.number, self.count, self.once = recording, number, count, once
        self.at = (0, number, 0)  # pass, place in its order, row of the episode
        self._open: tuple[tuple[int, int], Batch] = ((-1, -1), {})  # the current episode

    def take(self, rows: int, keys: Sequence[str], previous: Sequence[str]) -> Batch:
        """Return the next rows ``[rows, ...]``, the last of which is repeated by the next call.

        Args:
            keys: keys to read.
            previous: keys of ``PREVIOUS`` to add.
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
            if following is None:  # repeat its final observation
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
            episode = self.recording.episode(number, keys, 2 * self.count)
            episode = with_previous(episode, previous) if previous else episode
            self._open = (where[0], where[1]), episode
        return self._open[1]

    def _following(self, number: int, place: int) -> tuple[int, int] | None:
        """Return pass and place of the next episode; None: there is none."""
        if place + self.count < len(self.recording.order(number)):
            return number, place + self.count
        if self.once:
            return None
        number += 1
        while self.number >= len(self.recording.order(number)):  # with weights, passes vary in length
            number += 1
        return number, self.number


class RecordingCollector:
    """Collector of recorded episodes, consecutive in every column.

    It ignores the mode of a rollout. ``env_steps`` of the run count the steps read.

    Args:
        shard: its columns, and their number over all ranks.
        once: end after one pass; otherwise passes repeat.
        finishing: transforms of a segment; None: ``transforms`` of the algorithm.

    Raises:
        ConfigError: a needed key is missing, or there are fewer episodes than columns.
    """

    def __init__(
        self,
        recording: Recording,
        algorithm: Algorithm,
        ctx: RunContext,
        shard: EnvShard,
        once: bool,
        finishing: Sequence[Transform] | None = None,
    ) -> None:
        self.recording, self.algorithm, self.ctx, self.shard = recording, algorithm, ctx, shard
        self.finishing = transforms(algorithm, ctx, ctx.needs.keys) if finishing is None else finishing
        if (n := len(recording.order(0))) < shard.num_envs:
            raise ConfigError("num_envs", f"{shard.num_envs} environments, but the dataset has {n} episodes; use 1")
        if not ctx.spec.nested:
            self._missing(key for key in (*CORE, "obs", "action") if key not in recording.keys)
        changes = type(algorithm).postprocess is not Algorithm.postprocess
        kept = (*ctx.needs.keys, *CORE, "alive", *ctx.spec.nested)
        self._read = [key for key in recording.keys if changes or key in kept]
        self.cursors = [Cursor(recording, number, shard.num_envs, once) for number in shard.env_ids]
        self.spec = self._spec()  # finds missing keys and other spaces

    def _missing(self, keys: Iterable[str]) -> None:
        """Raise ``ConfigError`` for needed keys that neither the dataset nor the algorithm provides."""
        given = {*DERIVED} if self.ctx.spec.has_masks else {*DERIVED, "action_mask"}
        if missing := [key for key in keys if key not in given]:
            sources = self.recording.files
            lacking = next((source for source in sources if missing[0] not in source.keys), sources[0])
            said = f"{lacking.path} has no key {missing[0]!r}, which the algorithm needs"
            raise ConfigError("data.path", f"{said}; it has {', '.join(sorted(lacking.keys))}")

    def _spec(self) -> SegmentSpec:
        before = [cursor.at for cursor in self.cursors]
        try:
            row = tree.take(batch := self.collect(1), 0)
        except KeyError as error:  # from ``postprocess``
            self._missing([str(error.args[0])])
            raise
        given = {*batch}.union(*(batch[name] for name in self.ctx.spec.nested))
        self._missing(key for key in self.ctx.needs.keys if key not in given)
        for cursor, at in zip(self.cursors, before, strict=True):
            cursor.at = at
        every, rows = slice(0, len(self.cursors)), self.recording.lengths[self.recording.order(0)] + 1
        most = max(int(rows[b :: self.shard.num_envs].sum()) for b in range(self.shard.num_envs))
        return SegmentSpec(row, AutoresetMode.NEXT_STEP, (every,), steps=self.recording.steps(), rows=most)

    def episode_metrics(self) -> list[tuple[int, dict[str, float]]]:
        return []

    def collect(self, rows: int, *args: Any, **options: Any) -> Batch:
        """Read a segment ``[rows + 1, B]``. Other arguments of ``ShardCollector.collect`` are ignored."""
        previous = [key for key in PREVIOUS if key in self.ctx.needs.keys]
        columns = [cursor.take(rows + 1, self._read, previous) for cursor in self.cursors]
        arrays = tree.map(lambda *leaves: np.stack(leaves, 1), *columns)
        arrays["valid"][-1] = False
        batch = tree.map(torch.from_numpy, arrays)
        if "carry" in self.ctx.needs.keys:  # recurrent states of another policy are meaningless
            states = self.algorithm.initial_carry(len(self.cursors))
            batch["carry"] = tree.map(lambda x: x.cpu()[None].repeat(rows + 1, *[1] * x.ndim), states)
        with torch.inference_mode(), self.ctx.acting(self.shard):
            return finished(batch, self.finishing)

    def state(self) -> Tree:
        return {"env": "recording", "data": self.recording.identity(), "columns": [[*c.at] for c in self.cursors]}

    def load(self, state: Tree) -> None:
        """Restore the position of ``state``.

        Raises:
            ConfigError: the files have changed.
        """
        if state["data"] != (now := self.recording.identity()):
            changed = next((old[0] for old in state["data"] if old not in now), "there are more files")
            raise ConfigError("data.path", f"differs from the data that the run began with: {changed}")
        for cursor, at in zip(self.cursors, state["columns"], strict=True):
            cursor.at = tuple(at)

    def close(self) -> None:
        """Do nothing, because files are closed automatically."""


def open_recording(
    run: ResolvedRun, algorithm: Algorithm, ctx: RunContext, finishing: Sequence[Transform], env_ids: Sequence[int]
) -> RecordingCollector:
    """Open the files of ``data.path``, for some of the run's columns."""
    data = run.config.data
    order = run.config.seed if data.shuffle else None
    recording = Recording(data.path or [], Reading.by(data, run.spec), data.weights, order)
    for note in recording.reading.notes:
        print(f"rlplug: {note}", file=sys.stderr, flush=True)
    shard = EnvShard("actor", data.envs or ctx.num_envs, env_ids)
    return RecordingCollector(recording, algorithm, ctx, shard, run.loop.one_pass, finishing)


class MixedCollector:
    """Recorded columns followed by columns of real environments, as one shard with joint segments."""

    def __init__(self, recorded: RecordingCollector, played: ShardCollector) -> None:
        self.recorded, self.played, self.algorithm = recorded, played, played.algorithm

    @property
    def spec(self) -> SegmentSpec:
        recorded, played = self.recorded.spec, self.played.spec
        columns = slice(0, recorded.shards[0].stop + played.shards[0].stop)
        return replace(played, row=tree.cat([recorded.row, played.row]), shards=(columns,))

    def collect(self, rows: int, *args: Any, **options: Any) -> Batch:
        recorded = self.recorded.collect(rows)
        return tree.cat([recorded, on_cpu(self.played.collect(rows, *args, **options))], 1)

    def episode_metrics(self) -> list[tuple[int, dict[str, float]]]:
        return self.played.episode_metrics()

    def state(self) -> Tree:
        return self.played.state() | {"recorded": self.recorded.state()}

    def load(self, state: Tree) -> None:
        self.recorded.load(state["recorded"])
        self.played.load(state)

    def close(self) -> None:
        self.played.close()

"""Recording of a run's episodes, to files that are complete or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.api import Job, Run, Segment
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.checkpointing import atomic
from rlplug.collection.play import EpisodeSplitter
from rlplug.data import json_lines, parquet
from rlplug.data.source import needs_package
from rlplug.envs.spec_json import to_json
from rlplug.host import on_cpu
from rlplug.packages import versions
from rlplug.registry import hookimpl
from rlplug.types import Batch, EnvSpec, RunError, Tree

Write = Callable[[Path, Sequence[Batch], Mapping[str, Any]], None]
FORMATS: Mapping[str, tuple[str, Write]] = {
    "parquet": (".parquet", parquet.write),
    "json": (".json", json_lines.write),
}
LEFT_OUT = ("gradients", "priority", "version")
ENDLESS = 2**62


def digest(raw: Mapping[str, Any]) -> str:
    """Return a hash of a configuration without ``record.path``, as 8 hex digits."""
    return sha256(repr({**raw, "record": {**raw["record"], "path": None}}).encode()).hexdigest()[:8]


def episodes_of(played: Batch) -> Iterator[Batch]:
    """Yield the episodes of a job, leaves ``[L + 1, episodes, ...]``, as arrays ``[L + 1, ...]``."""
    rows = tree.map(np.asarray, {key: x for key, x in played.items() if key not in OF_EPISODE})
    for b, length in enumerate(played["length"].tolist()):
        yield tree.map(np.ascontiguousarray, tree.take(rows, (slice(0, length + 1), b)))


class EpisodeFiles:
    """Numbered files of one writer in a folder, which may have other writers.

    A file is written at ``max_file_size`` bytes, and whenever the state is saved. Files that are not part of a loaded
    state are newer than it and are deleted, because the run repeats their episodes.

    Args:
        cfg: the settings ``record``.
        name: name of the writer, which prefixes its files.
        about: metadata of every file: ``spec``, ``versions``.

    Raises:
        ConfigError: the format needs a package that is not installed.
    """

    def __init__(self, cfg: Any, name: str, about: Mapping[str, Any]) -> None:
        if cfg.format == "parquet":
            needs_package("pyarrow", "record.format=parquet")
        elif cfg.compress:
            needs_package("lz4.frame", "record.compress=true")
        self.folder, self.name, self.max_bytes = Path(cfg.path), name, cfg.max_file_size
        self.about = {**about, "compress": cfg.compress}
        self.suffix, self.write = FORMATS[cfg.format]
        self.number = 0  # number of the next file
        self._waiting: list[Batch] = []
        self._bytes = 0

    def add(self, episode: Batch) -> None:
        """Add an episode, arrays ``[L + 1, ...]``."""
        self._waiting.append(episode)
        self._bytes += sum(leaf.nbytes for leaf in tree.leaves(episode))
        if self._bytes >= self.max_bytes:
            self.flush()

    def add_all(self, played: Batch) -> None:
        """Write the episodes of a job, leaves ``[L + 1, episodes, ...]``; see ``api.Play``.

        Files of an earlier job of that name are replaced one by one; the rest are deleted at the end.

        Raises:
            RunError: the disk fails.
        """
        for rows in episodes_of(played):
            self.add(rows)
        self.flush()
        self.begin()

    def flush(self) -> None:
        """Write pending episodes.

        Raises:
            RunError: the disk fails.
        """
        if not self._waiting:
            return
        path = self.folder / f"{self.name}-{self.number:06}{self.suffix}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(path, self._waiting, self.about)
        except OSError as error:
            raise RunError(f"record.path: {path} cannot be written: {error.strerror or error}") from None
        self.number, self._waiting, self._bytes = self.number + 1, [], 0

    def begin(self) -> None:
        """Create the folder, and delete files from the next number on, which are rewritten or from an earlier job.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{self.name}-*"):
                if path.name >= f"{self.name}-{self.number:06}":
                    atomic.delete(path)
        except OSError as error:
            raise RunError(f"record.path: {self.folder} cannot be written: {error.strerror}") from None


def episode_files(config: Any, raw: Mapping[str, Any], spec: EnvSpec, name: str, **more: Any) -> EpisodeFiles:
    """Return the files of ``record.path``, with metadata of the run.

    Args:
        config: the core settings of the run.
        raw: its resolved configuration.
        name: name of the writer.
        more: other metadata.
    """
    about = {"spec": to_json(spec), "versions": versions(), "algo": raw["algo"]["name"], "env": raw["env"]}
    return EpisodeFiles(config.record, name, about | {"seed": config.seed} | more)


class Episodes:
    """Cuts the segments and jobs of a rank into episodes. Episodes still open at the end are dropped."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._shards: dict[int, EpisodeSplitter] = {}  # by first column

    def take(self, run: Run, rows: Batch) -> None:
        """Take an episode, arrays ``[L + 1, ...]``."""
        raise NotImplementedError

    @hookimpl
    def rlplug_collected(self, run: Run, segment: Segment) -> None:
        batch = on_cpu({key: leaf for key, leaf in segment.batch.items() if key not in LEFT_OUT})
        begin, end, _ = segment.columns.indices(self.num_envs)
        shard = self._shard(begin, end - begin)
        shard.add(batch)
        for rows in shard.drain():
            self.take(run, rows)

    @hookimpl
    def rlplug_played(self, run: Run, job: Job, batch: Batch) -> None:
        for rows in episodes_of({key: leaf for key, leaf in batch.items() if key not in LEFT_OUT}):
            self.take(run, rows)

    def _shard(self, begin: int, columns: int) -> EpisodeSplitter:
        if begin not in self._shards:
            self._shards[begin] = EpisodeSplitter(np.full(columns, ENDLESS), ENDLESS)
        return self._shards[begin]

    def state(self) -> Tree:
        """Return the open episodes."""
        shards = [[begin, len(shard.left), shard.state()] for begin, shard in self._shards.items()]
        return {"shards": shards}

    def load(self, state: Tree) -> None:
        for begin, columns, shard in state["shards"]:
            self._shard(begin, columns).load(shard)


class RunRecorder(Episodes):
    """Records the episodes of a rank."""

    def __init__(self, files: EpisodeFiles, num_envs: int) -> None:
        super().__init__(num_envs)
        self.files = files

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self.files.begin()

    def take(self, run: Run, rows: Batch) -> None:
        self.files.add(rows)

    def state(self) -> Tree:
        """Write the completed episodes, and return the open ones."""
        self.files.flush()
        return super().state() | {"files": self.files.number}

    def load(self, state: Tree) -> None:
        self.files.number = state["files"]
        super().load(state)

"""Writes down what a run collects: whole episodes in files that are complete or absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.api import Run, Segment
from rlplug.checkpointing import atomic
from rlplug.collection.play import OF_EPISODE, Recorder
from rlplug.collection.segment import on_cpu
from rlplug.data import json_lines, parquet
from rlplug.data.source import needs_package
from rlplug.registry import hookimpl
from rlplug.types import Batch, RunError, Tree

Write = Callable[[Path, Sequence[Batch], Mapping[str, Any]], None]
FORMATS: Mapping[str, tuple[str, Write]] = {
    "parquet": (".parquet", parquet.write),
    "json": (".json", json_lines.write),
}
LEFT_OUT = ("gradients", "priority", "version")
ENDLESS = 2**62


def digest(raw: Mapping[str, Any]) -> str:
    """Return what tells a command from others whose settings differ, in more than ``record.path``: 8 hex digits."""
    return sha256(repr({**raw, "record": {**raw["record"], "path": None}}).encode()).hexdigest()[:8]


class EpisodeFiles:
    """Numbered files of one writer in a folder, which others may write to as well.

    A file is written when so many bytes have come together, and whenever the state is asked for. Files that are not
    part of the state that is loaded were written later, and are deleted: what they hold comes again.

    Args:
        cfg: the settings ``record``.
        name: of the writer, with which its files begin.
        about: what every file says of itself: ``spec``, ``versions``.

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
        self.number = 0  # of the next file
        self._waiting: list[Batch] = []
        self._bytes = 0

    def add(self, episode: Batch) -> None:
        """Take an episode, arrays ``[L + 1, ...]``."""
        self._waiting.append(episode)
        self._bytes += sum(leaf.nbytes for leaf in tree.leaves(episode))
        if self._bytes >= self.max_bytes:
            self.flush()

    def add_all(self, played: Batch) -> None:
        """Write the episodes of a job, leaves ``[L + 1, episodes, ...]``; see ``api.Play``.

        Files of an earlier job of that name are replaced one by one; those that are left are deleted at the end.

        Raises:
            RunError: the disk refuses.
        """
        rows = tree.map(np.asarray, {key: x for key, x in played.items() if key not in OF_EPISODE})
        for b, length in enumerate(played["length"].tolist()):
            self.add(tree.map(np.ascontiguousarray, tree.take(rows, (slice(0, length + 1), b))))
        self.flush()
        self.begin()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            RunError: the disk refuses.
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
        """Make the folder, and delete the files from the next number on: they are written again, or of an earlier job.

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


class RunRecorder:
    """Cuts the segments that a rank collects into episodes. One that is still open when the run ends is not written."""

    def __init__(self, files: EpisodeFiles, num_envs: int) -> None:
        self.files, self.num_envs = files, num_envs
        self._shards: dict[int, Recorder] = {}  # by their first column

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self.files.begin()

    @hookimpl
    def rlplug_collected(self, run: Run, segment: Segment) -> None:
        batch = on_cpu({key: leaf for key, leaf in segment.batch.items() if key not in LEFT_OUT})
        if segment.whole:
            arrays = tree.map(np.asarray, batch)
            for b, length in enumerate(arrays["valid"].sum(0)):
                self.files.add(tree.map(np.ascontiguousarray, tree.take(arrays, (slice(0, length + 1), b))))
            return
        begin, end, _ = segment.columns.indices(self.num_envs)
        recorder = self._shard(begin, end - begin)
        recorder.add(batch)
        for _, _, rows in recorder.drain():
            self.files.add(rows)

    def _shard(self, begin: int, columns: int) -> Recorder:
        if begin not in self._shards:
            self._shards[begin] = Recorder(np.full(columns, ENDLESS), ENDLESS)
        return self._shards[begin]

    def state(self) -> Tree:
        """Write what has ended, and return what has not."""
        self.files.flush()
        shards = [[begin, len(shard.left), shard.state()] for begin, shard in self._shards.items()]
        return {"files": self.files.number, "shards": shards}

    def load(self, state: Tree) -> None:
        self.files.number = state["files"]
        for begin, columns, shard in state["shards"]:
            self._shard(begin, columns).load(shard)

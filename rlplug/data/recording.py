"""The dataset of a run: files, order of episodes, and cached chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from rlplug.data.arrays import npz_source
from rlplug.data.files import find
from rlplug.data.hdf5 import hdf5_source
from rlplug.data.json_lines import JsonSource
from rlplug.data.parquet import parquet_source
from rlplug.data.source import DatasetFile, Reading, refused, why
from rlplug.envs.spec_json import mismatch
from rlplug.types import Batch, ConfigError, EnvSpec, RunError

FORMATS: Mapping[str, Callable[[Path, Reading], DatasetFile]] = {
    ".parquet": parquet_source,
    ".json": JsonSource,
    ".jsonl": JsonSource,
    ".npz": npz_source,
    ".hdf5": hdf5_source,
    ".h5": hdf5_source,
}
ORDER = 4  # separates the order of episodes from other draws of the run's seed


class Recording:
    """Episodes of several sources, mixed by weights.

    A pass is an order of episodes. Without weights it has each episode once; with weights it has all episodes of the
    source that is shortest relative to its weight, and of the others steps in proportion to their weights, redrawn in
    every pass.

    Args:
        paths: files, folders or patterns; each is a source.
        weights: sampling weight of each path, in steps; None: all episodes of all paths.
        seed: seed of the order; None: recorded order.

    Raises:
        ConfigError: there is no file, no file with episodes, or one cannot be read.
    """

    def __init__(
        self, paths: Sequence[str], reading: Reading, weights: Sequence[float] | None = None, seed: int | None = None
    ) -> None:
        if weights is not None and len(weights) != len(paths):
            said = f"{len(weights)} weights for {len(paths)} paths; give one per path of data.path"
            raise ConfigError("data.weights", said)
        self.weights, self.seed, self.reading = weights, seed, reading
        self.files: list[DatasetFile] = []
        self._share: list[int] = []  # index of each source's path
        for i, path in enumerate(paths):
            for file in files_of(path, reading.key):
                self.files.append(open_file(file, reading))
                self._share.append(i)
        self.lengths = np.concatenate([source.lengths for source in self.files])
        self.returns = np.concatenate([source.returns for source in self.files])
        for i, path in enumerate(paths):
            if not sum(len(s.lengths) for s, of in zip(self.files, self._share, strict=True) if of == i):
                raise ConfigError(reading.key, f"{path} contains no episodes")
        for i, path in enumerate(paths):
            own = [source for source, of in zip(self.files, self._share, strict=True) if of == i]
            if any(source.normalized for source in own) and all(one.normalized for one in own if len(one.lengths)):
                said = f"{path} has actions in [-1, 1], scaled as if they were within env's own, wider bounds"
                reading.note(f"{said}; if they are normalized, as RLlib writes them, use data.normalized_actions=true")
        self.keys = frozenset.intersection(*(source.keys for source in self.files))
        self._begin = np.cumsum([0, *(len(source.lengths) for source in self.files)])
        self._starts = [np.array([part.start for part in source.chunks]) for source in self.files]
        self._kept: OrderedDict[tuple[int, int], list[Batch]] = OrderedDict()
        self._order = lru_cache(2)(self._drawn)

    def order(self, number: int) -> np.ndarray:
        """Return the episodes of a pass."""
        return self._order(number)

    def steps(self, number: int = 0) -> int:
        """Return the environment steps of a pass."""
        return int(self.lengths[self.order(number)].sum())

    def identity(self) -> list[list[str | int]]:
        """Return an identification of the data: name, episodes and steps of every file."""
        return [[one.path.name, len(one.lengths), int(one.lengths.sum())] for one in self.files]

    def episode(self, number: int, keys: Sequence[str] | None, keep: int) -> Batch:
        """Return the rows of an episode, caching the ``keep`` last used chunks."""
        i = int(np.searchsorted(self._begin, number, "right")) - 1
        source, inside = self.files[i], number - int(self._begin[i])
        chunk = int(np.searchsorted(self._starts[i], inside, "right")) - 1
        if (i, chunk) not in self._kept:
            self._kept[i, chunk] = self._read(source, chunk, keys)
            while len(self._kept) > keep:
                self._kept.popitem(last=False)
        self._kept.move_to_end((i, chunk))
        rows = self._kept[i, chunk][inside - source.chunks[chunk].start]
        return rows if keys is None else {key: rows[key] for key in keys}  # files may have additional keys

    def _read(self, source: DatasetFile, chunk: int, keys: Sequence[str] | None) -> list[Batch]:
        """Read a chunk of a file that was readable when opened.

        Raises:
            ConfigError: its rows do not have the run's spaces.
            RunError: it is no longer readable.
        """
        try:
            with self.reading.named():
                return source.read(chunk, keys)
        except (ConfigError, RunError, MemoryError):
            raise
        except Exception as error:  # as in ``open_file``
            raise RunError(f"{self.reading.key}: {source.path} cannot be read any more: {why(error)}") from error

    def _drawn(self, number: int) -> np.ndarray:
        """Return a random order that shuffles chunks, and episodes within chunks, so that each chunk is read once."""
        if self.seed is None and self.weights is None:
            return np.arange(len(self.lengths))
        rng = np.random.default_rng([self.seed or 0, ORDER, number])
        chunks = [
            np.arange(part.start, part.stop) + self._begin[i]
            for i, source in enumerate(self.files)
            for part in source.chunks
        ]
        shares = [self._share[i] for i, source in enumerate(self.files) for _ in source.chunks]
        if self.seed is not None:
            places = rng.permutation(len(chunks))
            chunks, shares = [rng.permutation(chunks[at]) for at in places], [shares[at] for at in places]
        if self.weights is None:
            return np.concatenate(chunks)
        return self._weighted(chunks, np.array(shares), np.array(self.weights))

    def _weighted(self, chunks: list[np.ndarray], shares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return episodes of every path, interleaved by weights, until one path is exhausted."""
        streams = [
            np.concatenate([c for c, of in zip(chunks, shares, strict=True) if of == i]) for i in range(len(weights))
        ]
        totals = np.array([self.lengths[stream].sum() for stream in streams])
        most = (totals / weights).min()
        kept, when = list[np.ndarray](), list[np.ndarray]()
        for stream, weight in zip(streams, weights, strict=True):
            until = self.lengths[stream].cumsum() / weight
            count = max(1, int(np.searchsorted(until, most * (1 + 1e-9), "right")))
            kept.append(stream[:count])
            when.append(until[:count])
        return np.concatenate(kept)[np.argsort(np.concatenate(when), kind="stable")]


def files_of(path: str, key: str) -> list[Path]:
    """Return the episode files of a path, folder or pattern; errors name the setting ``key``.

    Raises:
        ConfigError: there is none, or there are too many other files.
    """
    return find(path, key, FORMATS)


def open_file(path: Path, reading: Reading) -> DatasetFile:
    """Open a file of episodes, in the format of its suffix.

    Raises:
        ConfigError: its format is unknown, it cannot be read, or its spaces differ.
    """
    with reading.named():
        if path.suffix not in FORMATS:
            raise refused(path, f"has an unknown format: {', '.join(FORMATS)}")
        try:
            source: DatasetFile = FORMATS[path.suffix](path, reading)
        except (ConfigError, RunError):
            raise
        except MemoryError as error:
            raise refused(path, f"does not fit into memory: {why(error)}") from None
        except Exception as error:  # damaged or forged files can raise anything in a library
            raise refused(path, f"cannot be read: {why(error)}") from error
        if reading.spec is not None and source.spec is not None:
            check_spaces(path, source.spec, reading.spec)
        return source


def check_spaces(path: Path, own: EnvSpec, spec: EnvSpec) -> None:
    """Check that a file has the run's spaces.

    Raises:
        ConfigError: it has not.
    """
    bare = [replace(one, max_episode_steps=None, offers=frozenset[str]()) for one in (own, spec)]
    if difference := mismatch(*bare):
        there, here = difference.split(", and is ", 1)
        raise refused(path, f"was recorded in another environment: {there} there, and is {here} in env")

"""Plain arrays: ``.npz`` of NumPy, HDF5 as D4RL and Minari write it, and parquet tables of transitions."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.data.source import Reading, needs_package, refused
from rlplug.data.transitions import CALLED, check_rows, cut, ends, length_of, named, stream
from rlplug.types import Batch, EnvSpec

CHUNK = 2**20  # bytes that are read together, about


class FlatSource:
    """Transitions one behind another: columns ``[n, ...]``, which are sliced as they are read.

    Args:
        columns: by their names in the file; arrays, or what can be sliced like them.

    Raises:
        ConfigError: a column is missing, too short, or an episode has no end.
    """

    spec: EnvSpec | None = None

    def __init__(self, path: Path, reading: Reading, columns: Mapping[str, Any]) -> None:
        self.path, self.reading, self.columns = path, reading, named(columns, path)
        n = len(self.columns["reward"])
        try:
            check_rows(self.columns, n)
        except ValueError as error:
            raise refused(path, str(error)) from None
        over, number = ends(self.columns, n), self.columns.get("episode")
        terminated = np.asarray(
            self.columns["terminated"][:n] if "terminated" in self.columns else np.zeros(n)
        ).reshape(-1)
        reward = np.asarray(self.columns["reward"][:n], np.float64).reshape(-1)
        self._where: list[tuple[int, int, int]] = []  # begin, end and the steps that are kept
        for low, high in cut(over, None if number is None else np.asarray(number[:n]).reshape(-1)):
            where = f"{path}, the episode of rows {low} to {high - 1},"
            ended, has_next = bool(over[high - 1]), "next_obs" in self.columns
            if steps := length_of(high - low, ended, bool(terminated[high - 1]), has_next, reading, where):
                self._where.append((low, high, steps))
        self.lengths = np.array([steps for *_, steps in self._where], np.int64)
        self.returns = np.array([reward[low : low + steps].sum() for low, _, steps in self._where], np.float64)
        row = sum(leaf[:1].nbytes for leaf in tree.leaves(self.columns)) if n else 1
        self.chunks = grouped(self.lengths, max(1, CHUNK // row))
        flags = {"terminated", "truncated", "is_first", "valid"}
        self.keys = frozenset({*self.columns, *flags} - {"next_obs", "next_action_mask", "episode"})

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        part = self.chunks[chunk]
        begin, end = self._where[part.start][0], self._where[part.stop - 1][1]
        rows = tree.map(lambda x: np.asarray(x[begin:end]), self.columns)
        return [
            stream(tree.take(rows, slice(low - begin, high - begin)), steps, self.reading, self.path)
            for low, high, steps in self._where[part.start : part.stop]
        ]


def npz_source(path: Path, reading: Reading) -> FlatSource:
    """Open arrays that ``numpy.savez`` wrote. All of it is in memory.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            read = {name for name in file.files if name.replace("/", ".").split(".")[0] in CALLED}
            return FlatSource(path, reading, {name: file[name] if name in read else () for name in file.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise refused(path, f"cannot be read: {str(error).partition(chr(10))[0]}") from None


def hdf5_source(path: Path, reading: Reading) -> FlatSource | MinariSource:
    """Open HDF5 that D4RL or Minari wrote.

    Raises:
        ConfigError: it is no such file.
    """
    h5py = needs_package("h5py", str(path))
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise refused(path, f"cannot be read: {str(error).partition(chr(10))[0]}") from None
    if any(name.startswith("episode_") for name in file):
        return MinariSource(path, reading, file)
    found: dict[str, Any] = {}
    file.visititems(
        lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) and item.shape else None
    )
    kept = {name: item for name, item in found.items() if not name.startswith(("metadata", "infos"))}
    if "infos/action_log_probs" in found:
        kept["logp"] = found["infos/action_log_probs"]
    return FlatSource(path, reading, kept)


class MinariSource:
    """Episodes as Minari writes them: a group for each, whose observations are one more than its actions."""

    spec: EnvSpec | None = None

    def __init__(self, path: Path, reading: Reading, file: Any) -> None:
        self.path, self.reading, self.file = path, reading, file
        names = sorted((name for name in file if name.startswith("episode_")), key=lambda name: int(name[8:]))
        self._episodes: list[tuple[str, int]] = []
        returns = list[float]()
        for name in names:
            where = f"{path}, {name},"
            try:
                group = named(_leaves(file[name]), path)
                n, reward = len(group["reward"]), np.asarray(group["reward"], np.float64)
                check_rows(group, n, final=1)
                over = ends(group, n)
            except (OSError, KeyError, RuntimeError, ValueError) as error:
                reading.lost(where, str(error).partition("\n")[0])
                continue
            if n and length_of(n, bool(over[-1]), True, True, reading, where):
                self._episodes.append((name, n))
                returns.append(reward.sum())
        self.lengths = np.array([n for _, n in self._episodes], np.int64)
        self.returns = np.array(returns)
        row = 1
        if self._episodes:
            first = named(_leaves(file[self._episodes[0][0]]), path)
            self.keys = frozenset({*first, "terminated", "truncated", "is_first", "valid"} - {"episode"})
            row = sum(leaf[:1].nbytes for leaf in tree.leaves(first))
        else:
            self.keys = frozenset[str]()
        self.chunks = grouped(self.lengths, max(1, CHUNK // max(1, row)))

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        part, rows = self.chunks[chunk], list[Batch]()
        for name, steps in self._episodes[part.start : part.stop]:
            columns = tree.map(np.asarray, named(_leaves(self.file[name]), self.path))
            rows.append(stream(columns, steps, self.reading, self.path))
        return rows


def _leaves(group: Any) -> dict[str, Any]:
    """Return the data sets of an episode; ``infos`` only for log-probabilities."""
    found: dict[str, Any] = {}
    group.visititems(lambda name, item: found.update({name: item}) if hasattr(item, "dtype") else None)
    kept = {name: item for name, item in found.items() if not name.startswith("infos/")}
    for name in ("infos/logp", "infos/action_logp", "infos/action_log_probs"):
        if name in found:
            kept["logp"] = found[name][: len(group["rewards"])]
    return kept


def table_source(path: Path, reading: Reading, table: Any) -> FlatSource:
    """Take a parquet table of transitions that others wrote; all of it is in memory."""
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = column.to_pylist() if str(column.type).startswith(("list", "fixed_size_list")) else column.to_numpy()
        columns[name] = np.array(values)
    return FlatSource(path, reading, columns)


def grouped(lengths: np.ndarray, rows: int) -> list[range]:
    """Return ranges of consecutive episodes of about so many rows together."""
    if not len(lengths):
        return []
    number = (np.cumsum(lengths) - lengths) // rows
    stops = [*(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(lengths)]
    return [range(low, high) for low, high in zip([0, *stops], stops, strict=False)]

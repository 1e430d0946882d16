"""Transitions as plain arrays: NumPy ``.npz``, parquet tables, and D4RL's HDF5."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rlplug import tree
from rlplug.data.order import Order
from rlplug.data.source import Reading, check_size, refused
from rlplug.data.transitions import (
    CALLED,
    SAID,
    check_observations,
    check_rows,
    checked_actions,
    cut,
    ends,
    length_of,
    named,
    not_finite,
    streams,
)
from rlplug.types import Batch, EnvSpec

CHUNK = 2**20  # approximate bytes read together
KINDS = ("half", "float", "double", "int", "uint", "bool")  # prefixes of Arrow's numeric type names


class FlatSource:
    """Concatenated transitions: columns ``[n, ...]``, sliced lazily.

    Args:
        columns: arrays or sliceable objects, by their names in the file.

    Raises:
        ConfigError: a column is missing or too short, next observations belong to other rows, or an episode has no end.
    """

    spec: EnvSpec | None = None

    def __init__(self, path: Path, reading: Reading, columns: Mapping[str, Any]) -> None:
        self.path, self.reading, self.columns = path, reading, named(columns, path)
        try:
            n = check_rows(self.columns)
            check_observations(tree.take(self.columns, slice(0, 1)), reading, path)
            self.block = max(1, CHUNK // max(1, sum(leaf[:1].nbytes for leaf in tree.leaves(self.columns))))
            over, number = ends(self.columns, n), self.columns.get("episode")
            number = None if number is None else np.asarray(number[:n]).reshape(-1)
            apart = self._apart(over, number)
        except ValueError as error:
            raise refused(path, str(error)) from None
        self._where = self._kept(over | apart, number)
        begin, _, steps = self._where.T
        self.lengths = steps
        reward = np.r_[np.asarray(self.columns["reward"][:n], np.float64).reshape(-1), 0.0]
        spans = np.column_stack((begin, begin + steps)).reshape(-1)
        self.returns = np.add.reduceat(reward, spans)[::2] if len(spans) else np.zeros(0)
        self.chunks = grouped(self.lengths, self.block)
        self.normalized = n > 0
        for low in range(0, n, self.block):
            action = checked_actions(tree.take(self.columns["action"], slice(low, low + self.block)), reading, path)
            self.normalized = self.normalized and reading.looks_normalized(action)
        flags = {"terminated", "truncated", "is_first", "valid"}
        self.keys = frozenset({*self.columns, *flags} - {"next_obs", "next_action_mask", "episode"})

    def _apart(self, over: np.ndarray, number: np.ndarray | None) -> np.ndarray:
        """Return a mask ``[n]`` of transitions that end no episode but are not continued by the next row.

        Raises:
            ValueError: next observations belong to other rows, or episodes cannot be determined.
        """
        apart, again = np.zeros(len(over), np.bool_), resumed(over, number)
        if "next_obs" not in self.columns:
            if again.any():
                assert number is not None
                row = int(again.argmax())
                said = f"has the rows of episode {number[row]} in several places, the first of which ends in row {row}"
                raise ValueError(f"{said}; sort them by episode and step")
            return apart
        order = Order()
        apart = order.add(self.columns, over, number, self.block)
        order.check()
        order.apart += int(again.sum())
        apart |= again
        if note := order.note(self.path, sum(1 for _ in cut(over | apart, number))):
            self.reading.note(note)
        return apart

    def _kept(self, ended: np.ndarray, number: np.ndarray | None) -> np.ndarray:
        """Return begin, end and kept steps of the kept episodes, ``[episodes, 3]``."""
        n, has_next = len(ended), "next_obs" in self.columns
        found = np.array([*cut(ended, number)], np.int64).reshape(-1, 2)
        low, high = found.T
        flags = self.columns.get("terminated")
        terminated = np.zeros(n, np.bool_) if flags is None else np.asarray(flags[:n]).astype(np.bool_).reshape(-1)
        steps = high - low - ~(has_next | terminated[high - 1])
        wrong = not_finite(self.columns, self.block)
        rows, episodes = np.flatnonzero(wrong), np.searchsorted(high, np.flatnonzero(wrong), "right")
        for i in np.flatnonzero(~ended[high - 1] | (steps == 0) | np.isin(np.arange(len(low)), episodes)):
            where = f"{self.path}, the episode of rows {low[i]} to {high[i] - 1},"
            if len(bad := rows[episodes == i]):
                said = SAID[wrong[bad[0]] - 1]
                self.reading.lost(where, f"has {said} that is not a finite number, in row {bad[0]}")
                steps[i] = 0
                continue
            end = int(high[i]) - 1
            kept = length_of(
                end + 1 - int(low[i]), bool(ended[end]), bool(terminated[end]), has_next, self.reading, where
            )
            steps[i] = kept
        return np.column_stack((low, high, steps))[steps > 0]

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        part = self.chunks[chunk]
        begin, end, steps = self._where[part.start : part.stop].T
        rows = tree.map(lambda x: np.asarray(x[begin[0] : end[-1]]), self.columns)
        return streams(rows, begin - begin[0], steps, steps < end - begin, self.reading, self.path)


def resumed(over: np.ndarray, number: np.ndarray | None) -> np.ndarray:
    """Return a mask ``[n]`` of transitions followed by another episode's rows although their own continues later."""
    found = np.zeros(len(over), np.bool_)
    if number is None or len(number) < 2:
        return found
    _, which = np.unique(number, return_inverse=True)
    last = np.zeros(which.max() + 1, np.int64)
    np.maximum.at(last, which, np.arange(len(number)))
    stops = np.flatnonzero(number[1:] != number[:-1])
    found[stops] = ~over[stops] & (last[which[stops]] > stops)
    return found


def npz_source(path: Path, reading: Reading) -> FlatSource:
    """Open a file of ``numpy.savez``, loaded into memory.

    Raises:
        ConfigError, ValueError, zipfile.BadZipFile: the file is invalid.
    """
    with zipfile.ZipFile(path) as file:
        names = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
        read = {name: info for name, info in names.items() if name.replace("/", ".").split(".")[0] in CALLED}
        check_size(path, sum(info.file_size for info in read.values()), in_memory=True)
        return FlatSource(path, reading, {name: _array(file, read.get(name)) for name in names})


def _array(file: zipfile.ZipFile, info: zipfile.ZipInfo | None) -> Any:
    """Return an array of a zip file, after checking its header against its size; None for None."""
    if info is None:
        return ()
    with file.open(info) as stream:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, columns_first, dtype = read(stream)
        if dtype.kind not in "biuf":
            raise ValueError(f"{info.filename!r} contains {dtype} instead of numbers")
        data = stream.read()
    count = int(np.prod([float(size) for size in shape]))
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(data):
        raise ValueError(f"{info.filename!r} has {len(data)} bytes, but its header says {[*shape]} of {dtype}")
    return np.ndarray(shape, dtype, data, order="F" if columns_first else "C")


def table_source(path: Path, reading: Reading, file: Any) -> FlatSource:
    """Read an open parquet file of transitions from another library into memory.

    Raises:
        ConfigError: columns are missing.
        ValueError: a column is not numeric, or has lists of unequal length.
    """
    names = [field.name for field in file.schema_arrow]
    read = [name for name in names if name.replace("/", ".").split(".")[0] in CALLED]
    for name in read:
        kind = file.schema_arrow.field(name).type
        while str(kind).startswith(("list<", "large_list<", "fixed_size_list<")):
            kind = kind.value_type
        if not str(kind).startswith(KINDS):
            raise ValueError(f"{name!r} contains {kind} instead of numbers")
    of, groups = file.metadata, range(file.metadata.num_row_groups)
    chunks = [of.row_group(i).column(j) for i in groups for j in range(of.num_columns)]
    values = sum(
        one.num_values for one in chunks if one.path_in_schema.split(".")[0] in {n.split(".")[0] for n in read}
    )
    check_size(path, max(8 * values, of.num_rows), in_memory=True)
    table = file.read(columns=read)
    columns = {
        name: _column(name, column.combine_chunks())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return FlatSource(path, reading, {name: columns.get(name, ()) for name in names})


def _column(name: str, column: Any) -> np.ndarray:
    """Return an Arrow array of numbers or nested lists as an array ``[n, ...]``."""
    if column.null_count and not str(column.type).startswith(KINDS[:3]):
        raise ValueError(f"{name!r} has {column.null_count} rows without a value")
    if not hasattr(column, "value_lengths"):
        return column.to_numpy(zero_copy_only=False)
    n, inner = len(column), _column(name, column.flatten())
    sizes = column.value_lengths().to_numpy(zero_copy_only=False)
    if n and (sizes != sizes[0]).any():
        raise ValueError(f"{name!r} has rows of {sizes.min()} to {sizes.max()} values")
    return inner.reshape(n, int(sizes[0]) if n else 0, *inner.shape[1:])


def grouped(lengths: np.ndarray, rows: int) -> list[range]:
    """Return ranges of consecutive episodes with about ``rows`` rows each."""
    if not len(lengths):
        return []
    number = (np.cumsum(lengths) - lengths) // rows
    stops = [*(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(lengths)]
    return [range(low, high) for low, high in zip([0, *stops], stops, strict=False)]

"""Parquet files of whole episodes: a table row is a stream row, and a row group holds whole episodes.

The footer has the format version, the spaces, the shape of every column, and length and return of every episode, so a
file can be opened and summarized without reading rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.checkpointing import atomic
from rlplug.data.arrays import FlatSource, table_source
from rlplug.data.rows import check_leaves, check_stream, put
from rlplug.data.source import Reading, check_size, needs_package, refused, spec_of, why
from rlplug.data.transitions import check_finite
from rlplug.types import Batch, EnvSpec, RunError, groups_of

FORMAT = 1  # incremented when the meaning of a file changes
META = b"rlplug"
GROUP = 2**20  # approximate bytes of a row group, the unit that is in memory at a time
SMALL = 64  # from this number of elements, arrays are stored as bytes, several times as fast to read as lists


def write(path: Path, episodes: Sequence[Batch], about: Mapping[str, Any]) -> None:
    """Write episodes to a file atomically.

    Args:
        episodes: rows of each episode, arrays ``[L + 1, ...]``, all with the same keys.
        about: further content of the footer: ``spec``, ``versions``.

    Raises:
        ConfigError: pyarrow is not installed.
        OSError: the disk fails.
    """
    pa, pq = needs_package("pyarrow", "record.format=parquet"), needs_package("pyarrow.parquet", "parquet")
    leaves = [
        {"path": [*path], "dtype": leaf.dtype.name, "shape": [*leaf.shape[1:]]}
        for path, leaf in tree.items(episodes[0])
    ]
    groups = [*_groups(episodes)]
    steps = [[int(one["valid"].sum()) for one in group] for group in groups]
    totals = [[_return(one) for one in group] for group in groups]
    meta = {"format": FORMAT, "leaves": leaves, "steps": steps, "returns": totals, **about}
    schema = pa.schema(
        [(".".join(leaf["path"]), _type(pa, leaf)) for leaf in leaves], metadata={META: json.dumps(meta).encode()}
    )
    with atomic.renamed(path) as partial:
        with pq.ParquetWriter(
            partial, schema, compression="lz4", use_dictionary=False, write_page_checksum=True
        ) as file:
            for group in groups:
                rows = tree.cat(group)
                columns = [_column(pa, leaf, schema.field(i).type) for i, leaf in enumerate(tree.leaves(rows))]
                file.write_table(pa.Table.from_arrays(columns, schema=schema))
        atomic.flush(partial)


def parquet_source(path: Path, reading: Reading) -> ParquetSource | FlatSource:
    """Open a parquet file of rlplug, or a table of transitions.

    Raises:
        ConfigError: it is damaged, has a newer format, or has no transitions.
        OSError, ValueError: it is damaged.
    """
    pq = needs_package("pyarrow.parquet", str(path))
    # with read-ahead, each open file would hold a row group in memory
    file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
    meta = (file.schema_arrow.metadata or {}).get(META)
    if meta is None:
        return table_source(path, reading, file)
    return ParquetSource(path, reading, file, json.loads(meta))


class ParquetSource:
    """A file of ``write``, open as ``file``, with the ``meta`` of its footer.

    Raises:
        ConfigError: it has a newer format, or a row group is damaged.
        ValueError: the footer does not match the file.
    """

    normalized = False

    def __init__(self, path: Path, reading: Reading, file: Any, meta: Any) -> None:
        self.path, self.reading, self._file = path, reading, file
        self._pa = needs_package("pyarrow", str(path))
        _check_meta(self._pa, path, file, meta)
        self.meta, self._leaves = meta, meta["leaves"]
        self.spec: EnvSpec | None = spec_of(meta["spec"])
        self.keys = frozenset(leaf["path"][0] for leaf in self._leaves)
        self._groups = [group for group in range(len(meta["steps"])) if self._is_whole(group)]
        kept = [meta["steps"][group] for group in self._groups]
        ends = np.cumsum([0, *map(len, kept)])
        self.chunks = [range(low, high) for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        self.lengths = np.array([n for group in kept for n in group], np.int64)
        self.returns = np.array([x for group in self._groups for x in meta["returns"][group]], np.float64)

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        group = self._groups[chunk]
        try:
            rows = self._rows(group, keys)
        except (OSError, ValueError, self._pa.ArrowException) as error:
            said = f"{self.path}, row group {group}, cannot be read any more: {why(error)}"
            raise RunError(f"{self.reading.key}: {said}") from None
        ends = np.cumsum(np.array(self.meta["steps"][group]) + 1).tolist()
        return [tree.take(rows, slice(low, high)) for low, high in zip([0, *ends], ends, strict=False)]

    def _rows(self, group: int, keys: Sequence[str] | None = None) -> Batch:
        """Return the rows of a row group."""
        leaves = [leaf for leaf in self._leaves if keys is None or leaf["path"][0] in keys]
        names = [".".join(leaf["path"]) for leaf in leaves]
        table = self._file.read_row_group(group, names, use_threads=False)  # too small for threads to pay off
        rows: Batch = {}
        for leaf, column in zip(leaves, table.columns, strict=True):
            put(rows, leaf["path"], _array(column, leaf))
        return rows

    def _is_whole(self, group: int) -> bool:
        """Read a row group once, to find errors before training."""
        try:
            check_stream(rows := self._rows(group), np.array(self.meta["steps"][group]), self.spec)
            for part in groups_of(rows).values():
                check_finite(part)
        except MemoryError:  # a base class of some of Arrow's errors
            raise
        except (OSError, ValueError, self._pa.ArrowException) as error:
            self.reading.lost(f"{self.path}, row group {group}", why(error))
            return False
        return True


def _check_meta(pa: Any, path: Path, file: Any, meta: Any) -> None:
    """Check that a footer has this format and matches the file.

    Raises:
        ConfigError: it was written by a newer version.
        ValueError: an entry is missing, has another type, or does not match the file.
    """
    version = meta.get("format") if isinstance(meta, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise refused(path, f"was written by a newer rlplug, in format {version}; this one reads format {FORMAT}")
    if version != FORMAT or not {"leaves", "steps", "returns", "spec"} <= meta.keys():
        raise ValueError("its footer is damaged")
    leaves, schema, of = meta["leaves"], file.schema_arrow, file.metadata
    check_leaves(leaves)
    if schema.names != [".".join(leaf["path"]) for leaf in leaves]:
        raise ValueError("its footer names other columns than it has")
    for leaf in leaves:
        if (kind := schema.field(".".join(leaf["path"])).type) != _type(pa, leaf):
            raise ValueError(
                f"its footer declares {leaf['dtype']} {leaf['shape']} of {'.'.join(leaf['path'])!r}, which is {kind}"
            )
    width = sum(int(np.prod(leaf["shape"])) * np.dtype(leaf["dtype"]).itemsize for leaf in leaves)
    check_size(path, width * of.num_rows, in_memory=False)
    steps, returns = meta["steps"], meta["returns"]
    for groups, kind in ((steps, int), (returns, int | float)):
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(isinstance(one, kind) for one in group) for group in groups
        ):
            raise ValueError("its footer is damaged")
    rows = [of.row_group(i).num_rows for i in range(of.num_row_groups)]
    if [sum(group) + len(group) for group in steps] != rows or min(map(min, filter(None, steps)), default=1) < 1:
        raise ValueError("its footer gives a wrong number of rows")
    if [*map(len, steps)] != [*map(len, returns)]:
        raise ValueError("its footer is damaged")


def _groups(episodes: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Group episodes into row groups."""
    group, size = list[Batch](), 0
    for episode in episodes:
        group.append(episode)
        size += sum(leaf.nbytes for leaf in tree.leaves(episode))
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _return(episode: Batch) -> float:
    """Return the sum of an episode's rewards; with several agents, the mean over agents."""
    valid = episode["valid"]
    rewards = [part["reward"].reshape(len(valid), -1) for part in groups_of(episode).values()]
    return float(np.concatenate(rewards, 1)[valid].sum(0, dtype=np.float64).mean())


def _type(pa: Any, leaf: Mapping[str, Any]) -> Any:
    size = int(np.prod(leaf["shape"], dtype=np.int64))
    if size >= SMALL:
        return pa.binary(size * np.dtype(leaf["dtype"]).itemsize)
    kind = pa.from_numpy_dtype(np.dtype(leaf["dtype"]))
    return pa.list_(kind, size) if leaf["shape"] else kind


def _column(pa: Any, leaf: np.ndarray, kind: Any) -> Any:
    flat = np.ascontiguousarray(leaf)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    values = pa.array(flat.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, kind.list_size) if leaf.ndim > 1 else values


def _array(column: Any, leaf: Mapping[str, Any]) -> np.ndarray:
    """Return a column as an array ``[n, *shape]``."""
    kind, shape = column.type, (len(column), *leaf["shape"])
    chunk = column.combine_chunks()
    if needs_package("pyarrow", "parquet").types.is_fixed_size_binary(kind):
        data = np.frombuffer(chunk.buffers()[1], leaf["dtype"], offset=chunk.offset * kind.byte_width)
        return data[: int(np.prod(shape))].reshape(shape)
    values = chunk.flatten() if leaf["shape"] else chunk
    return values.to_numpy(zero_copy_only=False).astype(leaf["dtype"], copy=False).reshape(shape)

"""Parquet files of whole episodes: a row of the table is a row of the stream, a row group holds whole episodes.

The footer names the format's version, the spaces, how every column is shaped, and steps and return of every episode;
so a file is opened, and what is in it told, without reading rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.checkpointing import atomic
from rlplug.data.arrays import FlatSource, table_source
from rlplug.data.source import Reading, needs_package, refused
from rlplug.envs.spec_json import from_json
from rlplug.types import Batch, CheckpointError, EnvSpec, RunError, groups_of

FORMAT = 1  # is raised when the meaning of a file changes
META = b"rlplug"
GROUP = 2**20  # bytes of a row group, about: what is in memory of a file at a time
SMALL = 64  # elements, from which an array is stored as its bytes: lists of numbers take several times as long to read


def write(path: Path, episodes: Sequence[Batch], about: Mapping[str, Any]) -> None:
    """Write episodes into a file that is complete or absent, whatever happens meanwhile.

    Args:
        episodes: rows of each, arrays ``[L + 1, ...]``, all with the same keys.
        about: what else the footer holds: ``spec``, ``versions``.

    Raises:
        ConfigError: pyarrow is not installed.
        OSError: the disk refuses.
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
    """Open a parquet file: one of rlplug's own, or a table of transitions.

    Raises:
        ConfigError: it is damaged, of a newer format, or has no transitions.
    """
    pa, pq = needs_package("pyarrow", str(path)), needs_package("pyarrow.parquet", str(path))
    try:
        # buffered ahead, each open file would keep a row group
        file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        if META in (file.schema_arrow.metadata or {}):
            return ParquetSource(path, reading, file, json.loads(file.schema_arrow.metadata[META]))
        return table_source(path, reading, file.read())
    except MemoryError:
        raise
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise refused(path, f"cannot be read: {_first_line(error)}") from None


class ParquetSource:
    """A file that ``write`` wrote, open as ``file``, with the ``meta`` of its footer.

    Raises:
        ConfigError: it is of a newer format, or a row group is damaged.
    """

    def __init__(self, path: Path, reading: Reading, file: Any, meta: Mapping[str, Any]) -> None:
        self.path, self.reading, self._file = path, reading, file
        self._pa = needs_package("pyarrow", str(path))
        if meta["format"] != FORMAT:
            said = f"was written by a newer rlplug, in format {meta['format']}; this one reads format {FORMAT}"
            raise refused(path, said)
        self.meta, self._leaves = meta, meta["leaves"]
        self.spec: EnvSpec | None = None
        with suppress(CheckpointError):
            self.spec = from_json(meta["spec"])
        self.keys = frozenset(leaf["path"][0] for leaf in self._leaves)
        self._groups = [group for group in range(len(meta["steps"])) if self._is_whole(group)]
        kept = [meta["steps"][group] for group in self._groups]
        ends = np.cumsum([0, *map(len, kept)])
        self.chunks = [range(low, high) for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        self.lengths = np.array([n for group in kept for n in group], np.int64)
        self.returns = np.array([x for group in self._groups for x in meta["returns"][group]], np.float64)

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        group = self._groups[chunk]
        leaves = [leaf for leaf in self._leaves if keys is None or leaf["path"][0] in keys]
        try:
            table = self._file.read_row_group(group, [".".join(leaf["path"]) for leaf in leaves], use_threads=False)
        except (OSError, ValueError, self._pa.ArrowException) as error:
            said = f"{self.path}, row group {group}, cannot be read any more: {_first_line(error)}"
            raise RunError(f"{self.reading.key}: {said}") from None
        rows: Batch = {}
        for leaf, column in zip(leaves, table.columns, strict=True):
            *parents, name = leaf["path"]
            part = rows
            for parent in parents:
                part = part.setdefault(parent, {})
            part[name] = _array(column, leaf)
        ends = np.cumsum(np.array(self.meta["steps"][group]) + 1).tolist()
        return [tree.take(rows, slice(low, high)) for low, high in zip([0, *ends], ends, strict=False)]

    def _is_whole(self, group: int) -> bool:
        """Read a row group once, so that a damaged one is found before anything is learned."""
        try:
            self._file.read_row_group(group, use_threads=False)  # so small that threads cost more than they save
        except MemoryError:  # of Arrow, whose errors it is one of
            raise
        except (OSError, ValueError, self._pa.ArrowException) as error:
            self.reading.lost(f"{self.path}, row group {group}", _first_line(error))
            return False
        return True


def _groups(episodes: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Cut episodes into row groups."""
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
    """Return the sum of an episode's rewards; of several agents, the mean over their sums."""
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

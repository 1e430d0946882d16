"""Where a buffer keeps its rows between checkpoints: chunks that are written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlplug import tree
from rlplug.api import RowLog
from rlplug.types import Batch, Tree

CHUNK = 64 * 2**20
"""bytes of a file of rows, at most; what is held twice while one is written"""


@dataclass
class Chunk:
    """Rows ``start`` to ``end - 1``: in memory until they are written, a file afterwards."""

    start: int
    end: int
    rows: Batch | None
    path: Path | None = None
    record: dict[str, int | str] | None = None
    """bytes and checksum of the file"""


class FileRowLog(RowLog):
    """``api.RowLog``, one for the whole run.

    Args:
        chunks: what the checkpoint that a run continues from holds.
        read: gives the rows of a written chunk.
    """

    def __init__(
        self, chunks: list[Chunk] | None = None, state: Tree = None, read: Callable[[Chunk], Batch] | None = None
    ) -> None:
        self.chunks = chunks or []
        self.state = state
        self.end = max((chunk.end for chunk in self.chunks), default=0)
        self._read = read

    def append(self, start: int, rows: Batch) -> None:
        length = len(next(tree.leaves(rows)))
        size = sum(leaf[0].nbytes for leaf in tree.leaves(rows)) if length else 1
        step = max(1, CHUNK // size)
        for low in range(0, length, step):
            high = min(low + step, length)
            copied = tree.map(lambda x: x[low:high].detach().to("cpu", copy=True), rows)  # noqa: B023
            self.chunks.append(Chunk(start + low, start + high, copied))
        self.end = max(self.end, start + length)

    def trim(self, first: int) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk.end > first]

    def rows(self) -> Iterator[tuple[int, Batch]]:
        for chunk in self.chunks:
            if chunk.rows is not None:
                yield chunk.start, chunk.rows
            else:
                assert self._read is not None
                yield chunk.start, self._read(chunk)

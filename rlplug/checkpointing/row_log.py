"""A buffer's rows on their way into checkpoints: chunks, each of which is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlplug import tree
from rlplug.api import RowLog
from rlplug.types import Batch, Tree

CHUNK = 64 * 2**20
"""most bytes of a file of rows, and of the memory that a write needs on top"""


@dataclass
class Chunk:
    """Rows ``start`` to ``end - 1``: in memory (``rows``) until they are written, then in a file (``path``)."""

    start: int
    end: int
    rows: Batch | None
    path: Path | None = None
    record: dict[str, int | str] | None = None
    """size and checksum of the file"""


class FileRowLog(RowLog):
    """The ``api.RowLog`` of a whole run.

    Args:
        chunks: those of the checkpoint that the run continues from.
        state: the buffer's state in that checkpoint.
        read: returns the rows of a chunk that lies in a file.
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

"""The rows of a buffer in checkpoints: chunks, each of which is written once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlplug import tree
from rlplug.api import RowLog
from rlplug.checkpointing.serialize import Record, read_tree
from rlplug.types import Batch, Tree

CHUNK = 64 * 2**20
"""most bytes of a file of rows, and of the memory that a write needs on top"""


@dataclass
class Chunk:
    """Rows ``start`` to ``end - 1``: in memory (``rows``) until they are written, then in a file (``path``)."""

    start: int
    end: int
    rows: Batch
    path: Path | None = None
    record: Record = field(default_factory=dict[str, int | str])
    """size and checksum of the file"""
    part: int = 0
    """of the log, see ``api.RowLog.part``"""

    def load(self) -> Batch:
        """Return the rows, leaves ``[n, ...]``. Raises as ``read_tree``."""
        return self.rows if self.path is None else read_tree(self.path, self.record)


class FileRowLog(RowLog):
    """The ``api.RowLog`` of a whole run.

    Args:
        chunks: those of the checkpoint that the run continues from.
        number: of this part; 0: the log itself.
        state: the buffer's state in that checkpoint.
    """

    def __init__(self, chunks: Sequence[Chunk] = (), state: Tree = None, number: int = 0) -> None:
        self.number, self.own, self.state = number, [chunk for chunk in chunks if chunk.part == number], state
        self.end = max((chunk.end for chunk in self.own), default=0)
        others = sorted({chunk.part for chunk in chunks} - {number}) if not number else ()
        self.parts = {part: FileRowLog(chunks, number=part) for part in others}

    @property
    def chunks(self) -> list[Chunk]:
        """Those of all parts."""
        return [*self.own, *(chunk for part in self.parts.values() for chunk in part.own)]

    def part(self, number: int) -> FileRowLog:
        return self.parts.setdefault(number, FileRowLog(number=number))

    def append(self, start: int, rows: Batch) -> None:
        length = len(next(tree.leaves(rows)))
        size = sum(leaf[0].nbytes for leaf in tree.leaves(rows)) if length else 1
        step = max(1, CHUNK // size)
        for low in range(0, length, step):
            high = min(low + step, length)
            copied = tree.map(lambda x: x[low:high].detach().to("cpu", copy=True), rows)  # noqa: B023
            self.own.append(Chunk(start + low, start + high, copied, part=self.number))
        self.end = max(self.end, start + length)

    def trim(self, first: int) -> None:
        self.own = [chunk for chunk in self.own if chunk.end > first]

    def rows(self) -> Iterator[tuple[int, Batch]]:
        for chunk in self.own:
            yield chunk.start, chunk.load()

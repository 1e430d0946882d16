"""Where a buffer keeps its rows between checkpoints: pieces that are written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlplug.api import Store
from rlplug.types import Batch, Tree, leaves, map_leaves

PIECE = 64 * 2**20
"""bytes of a file of rows, at most; what is held twice while one is written"""


@dataclass
class Piece:
    """Rows ``start`` to ``end - 1``: in memory until they are written, a file afterwards."""

    start: int
    end: int
    rows: Batch | None
    path: Path | None = None
    record: dict[str, int | str] | None = None
    """bytes and checksum of the file"""


class RowStore(Store):
    """``api.Store``, one for the whole run.

    Args:
        pieces: what the checkpoint that a run continues from holds.
        read: gives the rows of a written piece.
    """

    def __init__(
        self, pieces: list[Piece] | None = None, state: Tree = None, read: Callable[[Piece], Batch] | None = None
    ) -> None:
        self.pieces = pieces or []
        self.state = state
        self.end = max((piece.end for piece in self.pieces), default=0)
        self._read = read

    def append(self, start: int, rows: Batch) -> None:
        length = len(next(leaves(rows)))
        size = sum(leaf[0].nbytes for leaf in leaves(rows)) if length else 1
        step = max(1, PIECE // size)
        for low in range(0, length, step):
            high = min(low + step, length)
            copied = map_leaves(lambda x: x[low:high].detach().to("cpu", copy=True), rows)  # noqa: B023
            self.pieces.append(Piece(start + low, start + high, copied))
        self.end = max(self.end, start + length)

    def trim(self, first: int) -> None:
        self.pieces = [piece for piece in self.pieces if piece.end > first]

    def rows(self) -> Iterator[tuple[int, Batch]]:
        for piece in self.pieces:
            if piece.rows is not None:
                yield piece.start, piece.rows
            else:
                assert self._read is not None
                yield piece.start, self._read(piece)

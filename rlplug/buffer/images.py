"""Encoded observations: deduplicated frames of stacked images, and compressed images."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlplug.types import Batch, ConfigError, RunError

EMPTY = -1
"""marks a frame of zeros"""
TOO_SMALL = (
    "images hardly compress: buffer.compressed_share={} holds less than one sample; raise it, or use"
    " buffer.compress=null"
)


class Pool(Protocol):
    """Stores one frame for every place of a ring, ``R`` rows by ``B`` columns."""

    def write(self, row: int, frames: Any) -> None:
        """Store ``frames [B, ...]`` of the stream's row ``row``; rows arrive in order."""
        ...

    def read(self, places: Any) -> Tensor:
        """Return the frames at ``places [n]``, ``[n, ...]``."""
        ...

    def oldest(self, first: int) -> int:
        """Return the first row from ``first`` on whose frames are still stored."""
        ...

    def begin(self, row: int) -> int:
        """Return the offset of row ``row``; 0 if it follows from the row number."""
        ...

    def resume(self, begin: int) -> None:
        """Set the offset of the next row to ``begin``."""
        ...

    def pack(self, at: Any) -> Batch:
        """Return the rows at places ``at [n]`` in their saved form; leaves ``[n, B, ...]``."""
        ...

    def unpack(self, row: int, saved: Batch) -> None:
        """Store the result of ``pack`` as rows ``row`` and following."""
        ...


class Raw(Pool):
    """Stores uncompressed frames, on any device."""

    def __init__(self, rows: int, columns: int, like: Any, device: torch.device) -> None:
        dtype = torch.from_numpy(like).dtype
        self.rows, self.frames = rows, torch.zeros(rows, columns, *like.shape[1:], dtype=dtype, device=device)

    @staticmethod
    def nbytes(rows: int, columns: int, frame: int) -> int:
        return rows * columns * frame

    def write(self, row: int, frames: Any) -> None:
        self.frames[row % self.rows] = torch.from_numpy(frames)

    def read(self, places: Any) -> Tensor:
        flat = torch.from_numpy(places).to(self.frames.device)
        return self.frames.flatten(0, 1).index_select(0, flat)

    def oldest(self, first: int) -> int:
        return first

    def begin(self, row: int) -> int:
        return 0

    def resume(self, begin: int) -> None:
        pass

    def pack(self, at: Any) -> Batch:
        return {"frame": self.frames[at]}

    def unpack(self, row: int, saved: Batch) -> None:
        at = (torch.arange(len(saved["frame"])) + row) % self.rows
        self.frames[at.to(self.frames.device)] = saved["frame"].to(self.frames.device)


class Compressed(Pool):
    """Stores LZ4 blocks in a ring of bytes; one that does not fit before the ring's end is written at its start.

    If blocks need more memory than the ring has, the oldest rows are dropped early.
    """

    def __init__(self, rows: int, columns: int, like: Any, share: float) -> None:
        self.rows, self.columns, self.shape = rows, columns, like.shape[1:]
        self.size = int(like[0].nbytes)
        self.bytes = np.zeros(self.capacity(rows, columns, self.size, share), np.uint8)
        self.start = np.zeros((rows, columns), np.int64)  # counted from the start of the run
        self.length = np.zeros((rows, columns), np.int32)
        self.end = 0
        self.share, self._warned = share, False
        self._lz4 = lz4()

    @staticmethod
    def capacity(rows: int, columns: int, frame: int, share: float) -> int:
        return int(rows * columns * frame * share)

    @staticmethod
    def nbytes(rows: int, columns: int, frame: int, share: float) -> int:
        return Compressed.capacity(rows, columns, frame, share) + 12 * rows * columns

    def write(self, row: int, frames: Any) -> None:
        blocks = [self._lz4.compress(np.ascontiguousarray(frame), store_size=False) for frame in frames]
        if sum(map(len, blocks)) + max(map(len, blocks)) > len(self.bytes):
            raise RunError(TOO_SMALL.format(self.share))
        for column, block in enumerate(blocks):
            self._put(row % self.rows, column, block)

    def _put(self, at: int, column: int, block: Any) -> None:
        length, size = len(block), len(self.bytes)
        offset = self.end % size
        if offset + length > size:
            self.end, offset = self.end + size - offset, 0
        self.bytes[offset : offset + length] = np.frombuffer(block, np.uint8)
        self.start[at, column], self.length[at, column] = self.end, length
        self.end += length

    def read(self, places: Any) -> Tensor:
        """Return the frames at ``places [n]``; each is decompressed once, even if it occurs several times."""
        places, again = np.unique(places, return_inverse=True)
        frames = np.empty((len(places), self.size), np.uint8)
        offsets, lengths = self.start.reshape(-1)[places] % len(self.bytes), self.length.reshape(-1)[places]
        for frame, offset, length in zip(frames, offsets.tolist(), lengths.tolist(), strict=True):
            block = self.bytes[offset : offset + length]
            frame[:] = np.frombuffer(self._lz4.decompress(block, uncompressed_size=self.size), np.uint8)
        return torch.from_numpy(frames).view(-1, *self.shape).index_select(0, torch.from_numpy(again.reshape(-1)))

    def oldest(self, first: int) -> int:
        row = first
        while self.start[row % self.rows, 0] < self.end - len(self.bytes):
            row += 1
        if row > first and not self._warned:
            self._warned = True
            warnings.warn(
                f"images compress to more than buffer.compressed_share={self.share} of their size: the replay keeps"
                " fewer rows than buffer.capacity; raise the share",
                stacklevel=2,
            )
        return row

    def begin(self, row: int) -> int:
        return int(self.start[row % self.rows, 0])

    def resume(self, begin: int) -> None:
        self.end = begin

    def pack(self, at: Any) -> Batch:
        starts, lengths = self.start[at] % len(self.bytes), self.length[at]
        block = np.zeros((*lengths.shape, int(lengths.max(initial=0))), np.uint8)
        for place in np.ndindex(lengths.shape):
            start, length = starts[place], lengths[place]
            block[place][:length] = self.bytes[start : start + length]
        return {"block": torch.from_numpy(block), "length": torch.from_numpy(lengths)}

    def unpack(self, row: int, saved: Batch) -> None:
        blocks, lengths = saved["block"].numpy(), saved["length"].numpy()
        for i in range(len(blocks)):
            for column in range(self.columns):
                self._put((row + i) % self.rows, column, blocks[i, column, : lengths[i, column]])


def lz4() -> Any:
    """Import the block format of the lz4 package.

    Raises:
        ConfigError: lz4 is not installed.
    """
    try:
        import lz4.block as block  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ConfigError("buffer.compress", "lz4 is not installed: pip install 'rlplug[lz4]'") from None
    return block


class Images:
    """The images of a ring, each a stack of ``stack`` frames; every frame is stored once.

    The newest frame of a row lies at the row's own place. ``back [R, B, stack]`` holds, for each frame of the stack,
    how many rows earlier it was the newest frame, or ``EMPTY``. So a stack may begin with zeros (ALE) or with
    repetitions of its first frame (Gymnasium); any other padding of first rows is refused.
    """

    def __init__(self, rows: int, columns: int, stack: int, pool: Pool, shape: Any) -> None:
        self.rows, self.columns, self.stack, self.pool, self.shape = rows, columns, stack, pool, shape
        self.back = np.zeros((rows, columns, stack), np.int16) if stack > 1 else None
        self.reach = np.zeros(rows, np.int64)  # the oldest row with a frame of this row's stacks
        self.there = 0
        """the first row whose own frames are stored"""
        self.oldest = 0
        """the first row whose images can be read"""
        self._last: Any = None  # the open row's images

    @property
    def nbytes_raw(self) -> int:
        """Return the bytes of one unencoded image."""
        return self._last[0].nbytes

    @staticmethod
    def nbytes(rows: int, columns: int, stack: int, image: int) -> int:
        """Return the bytes in addition to the pool's."""
        return rows * 8 + (rows * columns * stack * 2 if stack > 1 else 0) + columns * image

    def write(self, start: int, images: Tensor, is_first: Tensor) -> None:
        """Write rows ``start`` to ``start + T``; row ``start`` is already stored, unless the stream begins.

        Raises:
            RunError: the images are not stacks of frames.
        """
        stacks, first = images.numpy(), is_first.numpy()
        stacks = stacks.reshape(len(stacks), self.columns, self.stack, -1, *self.shape[1:])
        if self._last is None:
            self._row(start, stacks[0], None, first[0])
            self._last = stacks[0].copy()
        for t in range(1, len(stacks)):
            self._row(start + t, stacks[t], stacks[t - 1] if t > 1 else self._last, first[t])
        self._last[...] = stacks[-1]
        self._drop(start + len(stacks) - 1)

    def _row(self, row: int, new: Any, last: Any, first: Any) -> None:
        self.pool.write(row, new[:, -1])
        if self.back is None:
            self.reach[row % self.rows] = row
            return
        back, before = self.back[row % self.rows], self.back[(row - 1) % self.rows]
        if last is not None and np.array_equal(new[:, :-1], last[:, 1:]):
            back[:, :-1] = before[:, 1:] + (before[:, 1:] != EMPTY)
            back[:, -1] = 0
        else:
            for column in range(self.columns):
                back[column] = self._codes(new[column], last, before, column, bool(first[column]))
        self.reach[row % self.rows] = row - int(back.max())

    def _codes(self, new: Any, last: Any, before: Any, column: int, first: bool) -> Any:
        older = before[column] + (before[column] != EMPTY)
        if last is not None and np.array_equal(new[:-1], last[column, 1:]):
            return [*older[1:], 0]
        if last is not None and np.array_equal(new, last[column]):  # a column that waits for other columns
            return [*older[:-1], 0]
        if last is None and not first:  # the stack has frames from before the stream, so it cannot be read
            return range(self.stack - 1, -1, -1)
        codes = [0]
        for frame, after in zip(new[-2::-1], new[:0:-1], strict=True):
            if first and np.array_equal(frame, after):
                codes.insert(0, codes[0])
            elif first and not frame.any():
                codes.insert(0, EMPTY)
            else:
                raise RunError(
                    f"observations are not stacks of {self.stack} frames, oldest first: column {column} has frames"
                    + (" before its first one that are neither zeros nor repetitions" if first else "")
                    + (" that the previous row lacks" if not first else "")
                    + "; use buffer.deduplicate=false"
                )
        return codes

    def _drop(self, newest: int) -> None:
        """Drop rows before ``oldest``, which are no longer complete."""
        self.there = self.pool.oldest(max(self.there, newest - self.rows + 1))
        self.oldest = max(self.oldest, self.there)
        while self.oldest < newest and self.reach[self.oldest % self.rows] < self.there:
            self.oldest += 1

    def read(self, row: Any, column: Any) -> Tensor:
        """Return the images of rows ``row [T, n]`` of the columns ``column [n]``, ``[T, n, ...]``."""
        places = row % self.rows * self.columns + column
        if self.back is None:
            return self.pool.read(places.reshape(-1)).view(*row.shape, *self.shape)
        back = self.back.reshape(-1, self.stack)[places]
        empty = back == EMPTY
        places = (row[..., None] - np.where(empty, 0, back)) % self.rows * self.columns + column[:, None]
        frames = self.pool.read(places.reshape(-1))
        if empty.any():
            frames.index_fill_(0, torch.from_numpy(np.flatnonzero(empty)).to(frames.device), 0)
        return frames.view(*row.shape, *self.shape)

    def pack(self, start: int, count: int) -> Batch:
        """Return rows ``start`` and following in their saved form, ``[count, B, ...]``."""
        at = np.arange(start, start + count) % self.rows
        packed = self.pool.pack(at)
        return packed if self.back is None else packed | {"back": torch.from_numpy(self.back[at])}

    def unpack(self, start: int, saved: Batch) -> None:
        count = len(next(iter(saved.values())))
        rows = np.arange(start, start + count)
        self.pool.unpack(start, saved)
        self.reach[rows % self.rows] = rows
        if self.back is not None:
            back = self.back[rows % self.rows] = saved["back"].numpy()
            self.reach[rows % self.rows] -= back.max((1, 2))

    def resume(self, oldest: int, newest: int) -> None:
        """Prepare to write the row after ``newest``, once all rows from ``oldest`` on are unpacked."""
        self.there = self.oldest = oldest
        every = np.arange(self.columns)
        last = self.read(np.full((1, self.columns), newest), every)[0].cpu().numpy()
        self._last = last.reshape(self.columns, self.stack, -1, *self.shape[1:])
        self._drop(newest)

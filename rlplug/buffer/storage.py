"""A ring of stream rows, on any device and for any sampling scheme."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, RowLog
from rlplug.buffer.images import TOO_SMALL, Compressed, Images, Raw
from rlplug.buffer.options import Storage, check_compressible
from rlplug.buffer.paths import Path, as_stored, leaf_at, put_last, put_rows, set_leaf, without
from rlplug.types import Batch, ConfigError, RunError

STREAM = {"is_first", "valid", "terminated", "truncated"}
"""keys that lay out the rows"""

PIECE = 64 * 2**20
"""maximum bytes of encoded rows per chunk; a chunk's compressed images are padded to the longest one"""


class Ring:
    """``R`` rows by ``B`` columns. Row ``i`` of the stream lies at ``i % R``.

    Each observation is stored once: transition ``t`` is rows ``t`` and ``t + 1``. Stacked and compressed images are
    encoded (``Images``). Recurrent states are stored for every ``stride``-th row, if ``stride > 0``.

    Args:
        span: transitions of one sample, plus those before the next one starts.
        stride: rows between the starts of two samples; 0: they start at any row.
        columns: columns of a shard, among this process's environments; None: all.
    """

    def __init__(self, cfg: Storage, ctx: Context, span: int, stride: int = 0, columns: range | None = None) -> None:
        columns = range(len(ctx.env_ids)) if columns is None else columns
        self.begin, self.columns = columns.start, len(columns)
        self.cfg, self.span, self.stride, self.nested = cfg, span, stride, ctx.spec.nested
        # stacks of agents, whose axis precedes that of frames, are not encoded
        self.stack = ctx.spec.frame_stack if cfg.deduplicate and not ctx.spec.has_agents else 1
        self.rows = cfg.capacity // ctx.num_envs + 1
        least = span + ctx.rollout_length + self.stack - 1
        if self.rows <= least:
            raise ConfigError(
                "buffer.capacity",
                f"{cfg.capacity} keeps {self.rows - 1} rows of each of the {ctx.num_envs} environments, but a sample "
                f"and a collected segment span {least}; at least {ctx.num_envs * least} is needed",
            )
        if cfg.compress:
            check_compressible(cfg, ctx)
        self.device = ctx.device if cfg.device == "learner" else torch.device("cpu")
        self.pin = cfg.device == "pinned" and ctx.device.type == "cuda"
        self.written = 0
        """number of closed rows; one more is open"""
        self.valid: Any = None
        """which rows are valid, ``[R, B]``, on the CPU"""
        self._leaves: Batch = {}
        self._arrays: Batch = {}  # CPU memory as arrays: NumPy copies a few rows in a third of torch's time
        self._flat: Batch = {}  # the same, [R * B, ...]
        self._carry: Batch = {}
        self._refreshed = False  # whether recurrent states were replaced
        self._replaced = set[str]()  # keys whose values were replaced
        self._images: dict[Path, Images] = {}

    def __bool__(self) -> bool:
        """Return whether anything was written."""
        return bool(self._leaves)

    @property
    def first(self) -> int:
        """Return the first stored row."""
        return max(0, self.written - self.rows + 1)

    @property
    def oldest(self) -> int:
        """Return the first row that can be read: images may need earlier rows."""
        return max(images.oldest for images in self._images.values()) if self._images else self.first

    def nbytes(self, row: Batch) -> int:
        """Return the bytes of rows like ``row`` (leaves ``[B, ...]``)."""
        rest, total = dict(row), 0
        for path, leaf, stack in self._encoded(row, 1):
            image = leaf.nbytes // self.columns
            pool = (self.rows, self.columns, image // stack)
            total += Compressed.nbytes(*pool, self.cfg.compressed_share) if self.cfg.compress else Raw.nbytes(*pool)
            total += Images.nbytes(self.rows, self.columns, stack, image)
            rest = without(rest, path)
        if self.stride and "carry" in rest:
            total += self._states * sum(leaf.nbytes for leaf in tree.leaves(rest.pop("carry")))
        return total + self.rows * sum(leaf.nbytes for leaf in tree.leaves(rest))

    # ---- writing and reading --------------------------------------------------------------------------------------

    def write(self, segment: Batch) -> None:
        """Write a segment: rows 0..T-1 are closed; row T gets its action from the next ``write``.

        Raises:
            RunError: observations are not stacks, or the images of a sample do not fit.
        """
        if not self._leaves:
            self.allocate(segment)
        length = segment["valid"].shape[0] - 1
        if self._images or self._carry:
            segment = self._encode(segment)
        kept = self._arrays or self._leaves
        put_rows(kept, tree.map(as_stored, segment, kept), self.written % self.rows, length + 1, self.rows)
        self.written += length
        for images in self._images.values():
            if self.written - images.there < min(self.written, self.span + self.stack):
                raise RunError(TOO_SMALL.format(self.cfg.compressed_share))

    def read(self, row: Any, column: Any, length: int) -> Batch:
        """Read ``length + 1`` rows from ``row [n]`` on, of columns ``column [n]``; leaves ``[length + 1, n, ...]``."""
        rows = row + np.arange(length + 1)[:, None]
        places = rows % self.rows * self.columns + column
        if self._flat and not self.pin:
            batch = tree.map(lambda x: torch.from_numpy(x.take(places, 0)), self._flat)
        else:
            batch = self._take(self._leaves, places)
        for path, images in self._images.items():
            set_leaf(batch, path, self._placed(images.read(rows, column)))
        if self._carry:
            batch["carry"] = self._take(
                self._carry, (row // self.stride % self._states * self.columns + column)[None, :]
            )
        return batch

    def leaf(self, path: Path, row: Any, column: Any = None) -> Any:
        """Return a leaf, not an image, of rows ``row [...]`` as a CPU array, ``[..., B, *]``.

        Args:
            column: one per row, ``[n]`` like ``row [n]``; the result is then ``[n, *]``.
        """
        kept, places = leaf_at(self._leaves, path), (row % self.rows,) if column is None else (row % self.rows, column)
        return kept.numpy()[places] if kept.is_cpu else kept[places].cpu().numpy()

    def refresh(self, row: Any, column: Any, carry: Batch) -> None:
        """Replace the recurrent states before rows ``row [n]``, and before every ``stride``-th row after them.

        If a state is given twice, the one unrolled over more rows is kept.

        Args:
            carry: leaves ``[k, n, ...]``.

        Raises:
            RunError: rows have no states, or ``carry`` does not match those of a sample's rows.
        """
        if not self._carry:
            raise RunError("'carry' was fed back to a buffer whose rows have no recurrent state")
        for path, kept in tree.items(self._carry):
            new = leaf_at(carry, path)
            most = (self.span - self.stride + 1) // self.stride + 1
            if new.shape[1:] != (len(row), *kept.shape[2:]) or len(new) > most:
                raise RunError(
                    f"'carry' was fed back with a leaf of shape {list(new.shape)}; of {len(row)} samples it is"
                    f" [n, {len(row)}, {', '.join(map(str, kept.shape[2:]))}], n at most {most}: one state for every"
                    f" {self.stride} rows"
                )
            states = row // self.stride + np.arange(len(new))[:, None]
            put_last(kept, states % self._states * self.columns + column, new)
        self._refreshed = True

    @property
    def replaceable(self) -> set[str]:
        """Return the keys that ``replace`` accepts: all but images, and those of the stream."""
        return self._leaves.keys() - STREAM

    def replace(self, row: Any, column: Any, values: Batch) -> None:
        """Replace values of ``k`` rows from ``row [n]`` on; if a row is given twice, its last values count.

        Args:
            values: leaves ``[k, n, ...]``.

        Raises:
            RunError: a leaf has another shape, or more rows than a sample.
        """
        for path, new in tree.items(values):
            kept = leaf_at(self._leaves, path)
            if new.shape[1:] != (len(row), *kept.shape[2:]) or len(new) > self.span + 1:
                raise RunError(
                    f"{'.'.join(path)!r} was fed back with shape {list(new.shape)}; of {len(row)} samples it is [k,"
                    f" {', '.join(map(str, (len(row), *kept.shape[2:])))}], k at most the rows of a sample"
                )
            rows = row + np.arange(len(new))[:, None]
            put_last(kept, rows % self.rows * self.columns + column, new)
            self._replaced.add(path[0])

    def _take(self, kept: Batch, places: Any) -> Batch:
        host, shape = torch.from_numpy(places.reshape(-1)), places.shape
        index = host.to(self.device, non_blocking=True)

        def taken(x: Tensor) -> Tensor:
            out = torch.empty(len(host), *x.shape[2:], dtype=x.dtype, pin_memory=True) if self.pin else None
            flat = torch.index_select(x.flatten(0, 1), 0, index if x.device == self.device else host, out=out)
            return flat.view(*shape, *x.shape[2:]).to(self.device, non_blocking=True)

        return tree.map(taken, kept)

    def _placed(self, x: Tensor) -> Tensor:
        return x.pin_memory() if self.pin else x.to(self.device)

    def _encode(self, segment: Batch) -> Batch:
        """Write the encoded observations and return the rest."""
        is_first = segment["is_first"]
        for path, images in self._images.items():
            images.write(self.written, leaf_at(segment, path), is_first)
            segment = without(segment, path)
        if self._carry:
            kept = tree.take(segment["carry"], slice(-self.written % self.stride, None, self.stride))
            self._put_states(-(-self.written // self.stride), kept)
            segment = without(segment, ("carry",))
        return segment

    def _put_states(self, number: int, states: Batch) -> None:
        """Write the states of rows ``number * stride`` and following."""
        count = len(next(tree.leaves(states)))
        skip = max(0, count - self._states)
        states = tree.take(states, slice(skip, None))
        put_rows(self._carry, states, (number + skip) % self._states, count - skip, self._states)

    def allocate(self, like: Batch) -> None:
        """Allocate memory for rows like those of ``like``, leaves ``[n, B, ...]``.

        A subclass also allocates its own data per row, at the place ``row % self.rows``.
        """
        rest = dict(like)
        for path, leaf, stack in self._encoded(like, 2):
            shape = tuple(leaf.shape[2:])
            frame = np.zeros((self.columns, shape[0] // stack, *shape[1:]), leaf[:1].numpy().dtype)
            pool = (
                Compressed(self.rows, self.columns, frame, self.cfg.compressed_share)
                if self.cfg.compress
                else Raw(self.rows, self.columns, frame, self.device)
            )
            self._images[path] = Images(self.rows, self.columns, stack, pool, shape)
            rest = without(rest, path)
        if self.stride and "carry" in rest:
            self._carry = self._zeros(rest.pop("carry"), self._states)
        self._leaves = self._zeros(rest, self.rows)
        self._leaves["valid"] = torch.zeros(self.rows, self.columns, dtype=torch.bool)
        self.valid = self._leaves["valid"].numpy()
        self._arrays = tree.map(Tensor.numpy, self._leaves) if self.device.type == "cpu" else {}
        self._flat = tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._arrays)

    def _zeros(self, like: Batch, length: int) -> Batch:
        """Return zeros; NumPy's, unlike torch's, take CPU memory only when they are written."""

        def zeros(x: Tensor) -> Tensor:
            shape = (length, *x.shape[1:])
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=x.dtype, device=self.device)
            return torch.from_numpy(np.zeros(math.prod(shape) * x.itemsize, np.uint8)).view(x.dtype).view(shape)

        return tree.map(zeros, like)

    @property
    def _states(self) -> int:
        """Return the number of recurrent states per column."""
        return -(-self.rows // self.stride)

    def _encoded(self, like: Batch, axes: int) -> Iterator[tuple[Path, Any, int]]:
        """Yield path and leaf of the encoded observations, and the number of stacked frames.

        Args:
            axes: leading axes of ``like`` before those of an observation.
        """
        parts = {name: {"obs": like[name]["obs"]} for name in self.nested if "obs" in like[name]}
        for path, leaf in tree.items(parts if self.nested else {"obs": like["obs"]} if "obs" in like else {}):
            stack = self.stack if path == ("obs",) else 1
            if stack > 1 or (self.cfg.compress and leaf.ndim >= axes + 2 and str(leaf.dtype).endswith("uint8")):
                yield path, leaf, stack

    # ---- what a checkpoint holds ----------------------------------------------------------------------------------

    def save(self, log: RowLog) -> None:
        """Save closed rows once, in units that share a recurrent state, and the open rest each time."""
        if not self:
            return
        unit = self.stride or 1
        first, end = self.first - self.first % unit, self.written - self.written % unit
        start = max(first, log.end * unit)
        while start < end:
            length = min(end - start, self._at_once(start))
            log.append(start // unit, self._saved(start, length))
            start += length
        log.trim(first // unit)
        rest = self._saved(end, self.written + 1 - end, by_unit=False)
        log.state = {"written": self.written, "open": rest if self.stride else tree.take(rest, 0)}
        if self._refreshed:  # rows are not saved again: save all states
            log.state["carry"] = tree.take(self._carry, slice(min(self.written // unit + 1, self._states)))
        if self._replaced:
            rows = slice(min(self.written + 1, self.rows))
            log.state["replaced"] = {key: tree.take(self._leaves[key], rows) for key in sorted(self._replaced)}
        if self._images:
            log.state["images"] = {
                ".".join(path): {"shape": list(images.shape), "begin": images.pool.begin(self.first)}
                for path, images in self._images.items()
            }

    def _at_once(self, start: int) -> int:
        """Return the number of rows to save at a time."""
        if not self._images and not self.stride:
            return self.rows - start % self.rows
        unit = self.stride or 1
        row = sum(leaf[0].nbytes for leaf in tree.leaves(self._leaves))
        row += self.columns * sum(images.nbytes_raw for images in self._images.values())
        return max(1, PIECE // row // unit) * unit

    def _saved(self, start: int, length: int, by_unit: bool = True) -> Batch:
        """Return rows ``start`` and following; with recurrent states ``[n, stride, B, ...]``, with one state per unit.

        Args:
            by_unit: return whole units of ``stride`` rows.
        """
        at = start % self.rows
        if at + length <= self.rows:
            rows = tree.take(self._leaves, slice(at, at + length))
        else:
            rows = tree.map(lambda x: torch.cat([x[at:], x[: at + length - self.rows]]), self._leaves)
        for path, images in self._images.items():
            set_leaf(rows, path, images.pack(start, length))
        if self.stride and by_unit:
            rows = tree.map(lambda x: x.unflatten(0, (-1, self.stride)), rows)
        if self._carry:
            states = (np.arange(-(-length // self.stride)) + start // self.stride) % self._states
            rows["carry"] = tree.take(self._carry, torch.from_numpy(states).to(self.device))
        return rows

    def load(self, log: RowLog) -> None:
        """Restore the state of the saved ring."""
        state = log.state
        self.written = state["written"]
        rest = state["open"] if self.stride else tree.take(state["open"], None)
        end = self.written - self.written % (self.stride or 1)
        self.allocate(self._decoded_like(rest, state.get("images", {})))
        for path, images in self._images.items():
            images.pool.resume(state["images"][".".join(path)]["begin"])
        for number, rows in log.rows():
            if self.stride:
                states = {"carry": rows["carry"]} if "carry" in rows else {}
                rows = tree.map(lambda x: x.flatten(0, 1), without(rows, ("carry",))) | states
            self._restore(number * (self.stride or 1), rows)
        self._restore(end, rest)
        if "carry" in state:
            tree.put(self._carry, slice(len(next(tree.leaves(state["carry"])))), state["carry"])
            self._refreshed = True
        for key, leaf in state.get("replaced", {}).items():
            tree.put(self._leaves, slice(len(next(tree.leaves(leaf)))), {key: leaf})
            self._replaced.add(key)
        for images in self._images.values():
            images.resume(self.first, self.written)

    def _decoded_like(self, rows: Batch, encoded: Batch) -> Batch:
        """Return decoded rows in the shape and dtype of ``write``."""
        for name, known in encoded.items():
            path = tuple(name.split("."))
            saved = leaf_at(rows, path)
            dtype = saved["frame"].dtype if "frame" in saved else torch.uint8
            rows = without(rows, path)
            set_leaf(rows, path, torch.empty(1, self.columns, *known["shape"], dtype=dtype))
        return rows

    def _restore(self, start: int, rows: Batch) -> None:
        """Write rows ``start`` and following from ``_saved``, except those that are no longer stored."""
        rows = dict(rows)
        if self._carry:
            self._put_states(start // self.stride, rows.pop("carry"))
        skip = max(0, self.first - start)
        length = len(rows["valid"]) - skip
        if length <= 0:
            return
        rows = tree.take(rows, slice(skip, None))
        for path, images in self._images.items():
            images.unpack(start + skip, leaf_at(rows, path))
            rows = without(rows, path)
        put_rows(self._leaves, rows, (start + skip) % self.rows, length, self.rows)

"""Rows of streams in a ring, whatever they are drawn by and wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, RowLog
from rlplug.plugins.buffer.images import TOO_SMALL, Compressed, Images, Raw, lz4
from rlplug.settings import PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, RunError

PIECE = 64 * 2**20
"""bytes of encoded rows that are stored at once, at most; compressed images are padded to the longest of them"""

Path = tuple[str, ...]


@settings
class Storage:
    """Options of every buffer that keeps a ring of rows."""

    capacity: PositiveInt = option("Rows kept, over all environments.")
    device: Literal["cpu", "pinned", "learner"] = option("Where rows are kept.")
    deduplicate: bool = option("Whether a frame that is in several stacked observations is kept once.")
    compress: Literal["lz4"] | None = option("How images are compressed, without loss.")
    compressed_share: UnitFloat = option("Memory for compressed images, as a share of their size.")


class Ring:
    """``R`` rows by ``B`` columns. Row ``i`` of the stream lies at ``i % R``.

    An observation is kept once: transition ``t`` is rows ``t`` and ``t + 1``. Stacked and compressed images are
    encoded (``Images``); of a recurrent state every ``stride``-th row's is kept, where ``stride > 0``.

    Args:
        span: transitions of one sample, and those that may pass until one begins.
        stride: rows between the beginnings of two samples; 0: they begin at any row.
    """

    def __init__(self, cfg: Storage, ctx: Context, span: int, stride: int = 0) -> None:
        self.cfg, self.columns, self.span, self.stride = cfg, len(ctx.env_ids), span, stride
        self.nested = ctx.spec.nested
        # stacks of agents, whose axis comes before that of frames, are kept as they are
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
            _check_compressible(cfg, ctx)
        self.device = ctx.device if cfg.device == "learner" else torch.device("cpu")
        self.pin = cfg.device == "pinned" and ctx.device.type == "cuda"
        self.written = 0
        """closed rows; one more is open"""
        self.valid: Any = None
        """which rows are valid, ``[R, B]``, on the host"""
        self._leaves: Batch = {}
        self._carry: Batch = {}
        self._images: dict[Path, Images] = {}

    def __bool__(self) -> bool:
        """Has anything been written?"""
        return bool(self._leaves)

    @property
    def first(self) -> int:
        """The first row that is kept."""
        return max(0, self.written - self.rows + 1)

    @property
    def oldest(self) -> int:
        """The first row that can be read: images may need others before them."""
        return max(images.oldest for images in self._images.values()) if self._images else self.first

    def nbytes(self, row: Batch) -> int:
        """Bytes that rows like ``row`` (leaves ``[B, ...]``) take."""
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
        """Rows 0..T-1 of a segment are closed; row T waits for its action at the next ``write``.

        Raises:
            RunError: observations are no stacks, or there is no room for the images of a sample.
        """
        if not self._leaves:
            self._allocate(segment)
        length = segment["valid"].shape[0] - 1
        if self._images or self._carry:
            segment = self._encode(segment)
        _put_rows(self._leaves, segment, self.written % self.rows, length + 1, self.rows)
        self.written += length
        for images in self._images.values():
            if self.written - images.there < min(self.written, self.span + self.stack):
                raise RunError(TOO_SMALL.format(self.cfg.compressed_share))

    def read(self, row: Any, column: Any, length: int) -> Batch:
        """``length + 1`` rows from ``row [n]`` on, of the columns ``column [n]``; leaves ``[length + 1, n, ...]``."""
        rows = row + np.arange(length + 1)[:, None]
        batch = self._take(self._leaves, rows % self.rows * self.columns + column)
        for path, images in self._images.items():
            set_leaf(batch, path, self._placed(images.read(rows, column)))
        if self._carry:
            batch["carry"] = self._take(
                self._carry, (row // self.stride % self._states * self.columns + column)[None, :]
            )
        return batch

    def _take(self, kept: Batch, places: Any) -> Batch:
        host, shape = torch.from_numpy(places.reshape(-1)), places.shape
        if not self.pin and self.device.type == "cpu":
            return tree.map(lambda x: x.flatten(0, 1).index_select(0, host).view(*shape, *x.shape[2:]), kept)
        there = host.to(self.device)

        def taken(x: Tensor) -> Tensor:
            out = torch.empty(len(host), *x.shape[2:], dtype=x.dtype, pin_memory=True) if self.pin else None
            flat = torch.index_select(x.flatten(0, 1), 0, host if x.is_cpu else there, out=out)
            return flat.view(*shape, *x.shape[2:]).to(self.device)

        return tree.map(taken, kept)

    def _placed(self, x: Tensor) -> Tensor:
        return x.pin_memory() if self.pin else x.to(self.device)

    def _encode(self, segment: Batch) -> Batch:
        """Write what is encoded; give the rest."""
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
        """The states of rows ``number * stride`` and following."""
        count = len(next(tree.leaves(states)))
        skip = max(0, count - self._states)
        states = tree.take(states, slice(skip, None))
        _put_rows(self._carry, states, (number + skip) % self._states, count - skip, self._states)

    def _allocate(self, like: Batch) -> None:
        """Make room for rows like those of ``like``, leaves ``[n, B, ...]``."""
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

    def _zeros(self, like: Batch, length: int) -> Batch:
        return tree.map(lambda x: torch.zeros(length, *x.shape[1:], dtype=x.dtype, device=self.device), like)

    @property
    def _states(self) -> int:
        """How many recurrent states of a column are kept."""
        return -(-self.rows // self.stride)

    def _encoded(self, like: Batch, axes: int) -> Iterator[tuple[Path, Any, int]]:
        """Path and leaf of the observations that are encoded, and how many frames each stacks.

        Args:
            axes: of ``like`` before those of an observation.
        """
        parts = {name: {"obs": like[name]["obs"]} for name in self.nested if "obs" in like[name]}
        for path, leaf in tree.items(parts if self.nested else {"obs": like["obs"]} if "obs" in like else {}):
            stack = self.stack if path == ("obs",) else 1
            if stack > 1 or (self.cfg.compress and leaf.ndim >= axes + 2 and str(leaf.dtype).endswith("uint8")):
                yield path, leaf, stack

    # ---- what a checkpoint holds ----------------------------------------------------------------------------------

    def save(self, log: RowLog) -> None:
        """Closed rows are stored once, by as many as share a recurrent state; what is open, each time."""
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
        rest = self._saved(end, self.written + 1 - end, whole=False)
        log.state = {"written": self.written, "open": rest if self.stride else tree.take(rest, 0)}
        if self._images:
            log.state["images"] = {
                ".".join(path): {"shape": list(images.shape), "begin": images.pool.begin(self.first)}
                for path, images in self._images.items()
            }

    def _at_once(self, start: int) -> int:
        """How many rows are taken out at once."""
        if not self._images and not self.stride:
            return self.rows - start % self.rows
        unit = self.stride or 1
        row = sum(leaf[0].nbytes for leaf in tree.leaves(self._leaves))
        row += self.columns * sum(images.nbytes_raw for images in self._images.values())
        return max(1, PIECE // row // unit) * unit

    def _saved(self, start: int, length: int, whole: bool = True) -> Batch:
        """Rows ``start`` and following; with recurrent states ``[n, stride, B, ...]``, and one of those for each.

        Args:
            whole: they are whole units.
        """
        at = start % self.rows
        if at + length <= self.rows:
            rows = tree.take(self._leaves, slice(at, at + length))
        else:
            rows = tree.map(lambda x: torch.cat([x[at:], x[: at + length - self.rows]]), self._leaves)
        for path, images in self._images.items():
            set_leaf(rows, path, images.pack(start, length))
        if self.stride and whole:
            rows = tree.map(lambda x: x.unflatten(0, (-1, self.stride)), rows)
        if self._carry:
            states = (np.arange(-(-length // self.stride)) + start // self.stride) % self._states
            rows["carry"] = tree.take(self._carry, torch.from_numpy(states).to(self.device))
        return rows

    def load(self, log: RowLog) -> None:
        """Be as the ring was that saved."""
        state = log.state
        self.written = state["written"]
        rest = state["open"] if self.stride else tree.take(state["open"], None)
        end = self.written - self.written % (self.stride or 1)
        self._allocate(self._decoded_like(rest, state.get("images", {})))
        for path, images in self._images.items():
            images.pool.resume(state["images"][".".join(path)]["begin"])
        for number, rows in log.rows():
            if self.stride:
                states = {"carry": rows["carry"]} if "carry" in rows else {}
                rows = tree.map(lambda x: x.flatten(0, 1), without(rows, ("carry",))) | states
            self._restore(number * (self.stride or 1), rows)
        self._restore(end, rest)
        for images in self._images.values():
            images.resume(self.first, self.written)

    def _decoded_like(self, rows: Batch, encoded: Batch) -> Batch:
        """Rows as they are written, in shape and type."""
        for name, known in encoded.items():
            path = tuple(name.split("."))
            saved = leaf_at(rows, path)
            dtype = saved["frame"].dtype if "frame" in saved else torch.uint8
            rows = without(rows, path)
            set_leaf(rows, path, torch.empty(1, self.columns, *known["shape"], dtype=dtype))
        return rows

    def _restore(self, start: int, rows: Batch) -> None:
        """Rows ``start`` and following as ``_saved`` gave them, without those that are no longer kept."""
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
        _put_rows(self._leaves, rows, (start + skip) % self.rows, length, self.rows)


def _check_compressible(cfg: Storage, ctx: Context) -> None:
    if cfg.device == "learner" and ctx.device.type != "cpu":
        raise ConfigError("buffer.compress", "images are compressed on the host; take buffer.device=cpu or pinned")
    lz4()
    if not any(_holds_images(group.obs) for group in ctx.spec.groups.values()):
        seen = "; ".join(str(group.obs) for group in ctx.spec.groups.values())
        raise ConfigError(
            "buffer.compress", f"only uint8 images are compressed, but observations are {seen}; take null"
        )


def _holds_images(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return any(_holds_images(inner) for inner in space.values())
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2


def _put_rows(storage: Batch, rows: Batch, at: int, length: int, size: int) -> None:
    """Write ``length`` rows from place ``at`` on, around the end of the ring."""
    if at + length <= size:
        tree.put(storage, slice(at, at + length), rows)
    else:
        tree.put(storage, slice(at, size), tree.take(rows, slice(size - at)))
        tree.put(storage, slice(at + length - size), tree.take(rows, slice(size - at, None)))


# ---- leaves by their path -----------------------------------------------------------------------------------------


def leaf_at(batch: Batch, path: Path) -> Any:
    return reduce(lambda inner, key: inner[key], path, batch)


def set_leaf(batch: Batch, path: Path, leaf: Any) -> None:
    reduce(lambda inner, key: inner.setdefault(key, {}), path[:-1], batch)[path[-1]] = leaf


def without(batch: Batch, path: Path) -> Batch:
    """Return a copy that lacks one leaf."""
    key, *inner = path
    if inner:
        return batch | {key: without(batch[key], tuple(inner))}
    return {name: leaf for name, leaf in batch.items() if name != key}

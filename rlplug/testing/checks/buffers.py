"""Buffers keep streams: transition t is rows t and t + 1 of one column, whatever was overwritten."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Buffer, Needs
from rlplug.config import choose
from rlplug.registry import load
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, require, some
from rlplug.testing.context import context, spec
from rlplug.trainer.checkpoint import Draft, folder_of, write
from rlplug.trainer.context import RunContext
from rlplug.trainer.store import Piece, RowStore
from rlplug.trainer.trees import decode, encode, snapshot
from rlplug.types import Batch, leaves, map_leaves

COLUMNS, ROWS, SAMPLES, CAPACITY = 5, 4, 16, 120


class Stream:
    """Numbered rows: row ``i`` of column ``b`` says ``i * COLUMNS + b``; episodes of uneven length, and gaps.

    Column 0 is one long episode, the last column has stretches of rows that are not valid.
    """

    def __init__(self, length: int) -> None:
        dice = np.random.default_rng(0)
        number = np.arange(length * COLUMNS).reshape(length, COLUMNS)
        final = np.zeros((length, COLUMNS), np.bool_)
        for column in range(1, COLUMNS):
            at = 0
            while at < length:
                at += int(dice.integers(1, 9))
                final[at : at + 1, column] = True
                at += 1
        valid = ~final
        valid[:, -1] &= np.arange(length) % 17 < 11
        first = np.zeros_like(final)
        first[0], first[1:] = True, final[:-1]
        ended = np.zeros_like(final)
        ended[:-1] = final[1:]
        rows = {
            "obs": np.repeat(number[..., None], 3, -1).astype(np.float32),
            "action": number,
            "reward": number.astype(np.float32),
            "terminated": ended & (number % 2 == 0),
            "truncated": ended & (number % 2 == 1),
            "is_first": first,
            "valid": valid,
        }
        self.rows: Batch = map_leaves(torch.from_numpy, rows)
        self.memory: Batch = {}

    def segment(self, start: int) -> Batch:
        """Rows ``start`` to ``start + ROWS``, in the same memory every time, as a source gives them."""
        fresh = {key: leaf[start : start + ROWS + 1].clone() for key, leaf in self.rows.items()}
        fresh["valid"][-1] = False
        if not self.memory:
            self.memory = fresh
        for key, leaf in fresh.items():
            self.memory[key].copy_(leaf)
        return dict(self.memory)


def make(name: str, window: int, ctx: RunContext | None = None, **changes: Any) -> Buffer:
    """The buffer for ``COLUMNS`` environments; small, where it has a capacity."""
    option = option_of("buffer", name)
    node = node_of("buffer", option)
    node |= ({"capacity": CAPACITY} if "capacity" in node else {}) | changes
    stale = getattr(load("buffer", name), "stale", None)
    require(isinstance(stale, bool), "the class says stale = True (windows out of old data) or False (the last round)")
    return choose("buffer", "buffer", node).build(ctx or _context(window, bool(stale)))


def _context(window: int, stale: bool) -> RunContext:
    needs = Needs(window=window, stale=stale, keys=("obs", "action"))
    return context(spec(3, 2), needs=needs, num_envs=COLUMNS, rows=ROWS, batch_size=SAMPLES)


def check_streams(name: str, **changes: Any) -> None:
    """Through several times its capacity: what is sampled is what was added, row by row."""
    for window in (1, 3):
        stream, buffer = Stream(CAPACITY * 2), make(name, window, **changes)
        require(not buffer.ready(), "an empty buffer says that it is ready")
        drawn, ids, added, was_ready = set[int](), dict[int, int](), list[int](), False
        for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
            buffer.add(stream.segment(start))
            added += _numbers({key: leaf[start : start + ROWS] for key, leaf in stream.rows.items()})
            require(buffer.ready() or not was_ready, f"{name} was ready, and no longer is after a further segment")
            was_ready = buffer.ready()
            if turn % 2 or not was_ready:  # two segments between two samples
                continue
            sample = buffer.sample()
            drawn |= _check_sample(stream, sample, window)
            _check_index(sample, ids)
            was_ready = buffer.ready()
            require(was_ready == buffer.stale, f"stale = {buffer.stale}, but after a sample ready() is {was_ready}")
            if was_ready:
                _keeps_its_own(buffer, sample)
            else:
                require(_numbers(sample) == sorted(added), "drained, it gives every transition of the round once")
                added = []
        require(drawn, f"{name} was never ready within {CAPACITY * 2} rows of {COLUMNS} environments (window {window})")
        columns = {number % COLUMNS for number in drawn}
        require(columns == set(range(COLUMNS)), f"only the columns {sorted(columns)} of {COLUMNS} were ever sampled")


def _numbers(rows: Batch) -> list[int]:
    return sorted(rows["action"][rows["valid"]].tolist())


def _check_sample(stream: Stream, sample: Batch, window: int) -> set[int]:
    """Numbers of the transitions in a sample that is right."""
    valid, number = sample["valid"], sample["action"]
    require(valid.ndim == 2, f"a sample's leaves are [T+1, B, ...], but valid has shape {list(valid.shape)}")
    require(len(valid) > window, f"a sample has {len(valid)} rows; a window of {window} transitions needs {window + 1}")
    require("index" not in sample or valid[:-1].any(0).all(), "a sample has columns that carry no loss: no valid row")
    truth = {key: leaf.flatten(0, 1) for key, leaf in stream.rows.items()}
    t, b = valid[:-1].nonzero().unbind(1)
    now, after = number[t, b], sample["obs"][t + 1, b, 0].long()
    far = after != now + COLUMNS
    require(
        not far.any(),
        f"behind rows {now[far][:3].tolist()} of the stream stand {after[far][:3].tolist()}, not the next ones"
        f" of their columns (window {window}): look at wrap-around, and at the row that the next segment overwrites",
    )
    require(truth["valid"][now].all(), "a row that is not valid came back as valid")
    for key in ("obs", "reward", "terminated", "truncated", "is_first"):
        require(key in sample, f"a sample lacks {key!r}")
        same = torch.equal(sample[key][t, b], truth[key][now])
        require(same, f"{key!r} of a sampled row is not what was added: copy a segment's memory, it is written again")
    return set(now.tolist())


def _check_index(sample: Batch, ids: dict[int, int]) -> None:
    """An insertion id means one transition, for ever."""
    if "index" not in sample:
        return
    for key in ("index", "prob"):
        require(sample[key].shape == sample["valid"].shape[1:], f"{key!r} has a number for every column of a sample")
    require((sample["prob"] > 0).all() and (sample["prob"] <= 1).all(), "'prob' lies in (0, 1]")
    for index, number in zip(sample["index"].tolist(), sample["action"][0].tolist(), strict=True):
        require(ids.setdefault(index, number) == number, f"the insertion id {index} stands for two transitions")


def _keeps_its_own(buffer: Buffer, sample: Batch) -> None:
    """What a learner writes into a sample, and priorities of ids that are long gone, do no harm."""
    for leaf in flat(sample).values():
        leaf.zero_()
    if "index" in sample:
        buffer.feedback(sample["index"], {"priority": torch.ones(len(sample["index"]))})


def check_saves(name: str, **changes: Any) -> None:
    """Saved and loaded again and again, through several times its capacity, it stays equal to one that never was."""
    stream, ctx = Stream(CAPACITY * 2), _context(3, load("buffer", name).stale)
    twin, buffer = make(name, 3, **changes), make(name, 3, ctx, **changes)  # equal seeds: they draw the same
    store, added = Counting(), 0
    with tempfile.TemporaryDirectory() as folder:
        for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
            twin.add(stream.segment(start))
            buffer.add(stream.segment(start))
            added += ROWS
            if turn % 3 == 0:
                store.appended = 0
                buffer.save(store)
                require(
                    store.appended <= added,
                    f"save() appends {store.appended} rows, of which {added} are new: begin at store.end",
                )
                added = 0
                write(folder_of(Path(folder), turn), Draft({}, {}, store.pieces))
                store = Counting(store.pieces, decode(encode(snapshot(store.state))), _written)
                buffer = make(name, 3, ctx, **changes)
                buffer.load(store)
            require(buffer.ready() == twin.ready(), "after load() it is ready when it was not, or the reverse")
            if turn % 2 and twin.ready():
                names = differences(twin.sample(), buffer.sample())
                require(not names, f"after load() it samples other {some(names)}: save() what sample() reads")


def _written(piece: Piece) -> Batch:
    assert piece.path is not None
    return decode(piece.path.read_bytes())


class Counting(RowStore):
    """A store that counts the rows that are appended."""

    appended = 0

    def append(self, start: int, rows: Batch) -> None:
        super().append(start, rows)
        self.appended += len(next(leaves(rows)))


def check_nbytes(name: str, **changes: Any) -> None:
    """``nbytes`` is an upper bound of what is kept, and at most a tenth above it."""
    stream, buffer = Stream(CAPACITY * 2), make(name, 1, **changes)
    row = {key: leaf[0] for key, leaf in stream.rows.items()}
    said = buffer.nbytes(row)
    for start in range(0, CAPACITY * 2 - ROWS - 1, ROWS):
        if not buffer.ready() or len(_arrays(buffer)) == 0 or "index" in buffer.sample():
            buffer.add(stream.segment(start))
    kept = sum(_arrays(buffer).values())
    require(kept <= said, f"nbytes() says {said}, but {kept} bytes are kept: count every array")
    require(said <= 1.1 * kept + 1024, f"nbytes() says {said}, but only {kept} bytes are kept")


def _arrays(root: Any) -> dict[int, int]:
    """Bytes of every piece of memory that an object's own tensors and arrays refer to, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def visit(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            base = thing if thing.base is None or not isinstance(thing.base, np.ndarray) else thing.base
            found[base.ctypes.data] = base.nbytes
        elif isinstance(thing, dict):
            for value in thing.values():
                visit(value)
        elif isinstance(thing, list | tuple | set):
            for value in thing:
                visit(value)
        elif type(thing).__module__ == type(root).__module__:
            visit(vars(thing))

    visit(root)
    return found

"""JSON lines in RLlib's format: a line is a ``SampleBatch``, whose columns may be packed; see ``data.packed``."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlplug import tree
from rlplug.checkpointing import atomic
from rlplug.data.order import Order, equal
from rlplug.data.packed import unpack
from rlplug.data.rows import check_leaves, check_stream, put
from rlplug.data.source import Reading, needs_package, refused, shown, spec_of, why
from rlplug.data.transitions import (
    CALLED,
    check_finite,
    check_observations,
    check_rows,
    checked_actions,
    cut,
    ends,
    length_of,
    named,
    stream,
)
from rlplug.types import Batch, EnvSpec

SPACES = ".spaces"  # suffix of the file that accompanies rlplug's own files and describes their columns
COLUMNS = {
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "logp": "action_logp",
}
"""RLlib's names of columns"""
SKIPPED = ("is_first", "valid", "obs")
LINE = 2**29  # maximum bytes of a line
PIECE = 2**20  # bytes of a line read at a time
BESIDE = 2**26  # maximum bytes of a file of spaces


def write(path: Path, episodes: Sequence[Batch], about: Mapping[str, Any]) -> None:
    """Write one episode per line; the file is complete or absent.

    Args:
        episodes: rows of each episode, arrays ``[L + 1, ...]``.
        about: content of the accompanying file, ``spec`` and ``versions``; ``compress``: compress observations.

    Raises:
        ConfigError: LZ4 is not installed.
        OSError: the disk fails.
    """
    leaves = [{"path": [*key], "dtype": x.dtype.name, "shape": [*x.shape[1:]]} for key, x in tree.items(episodes[0])]
    lines = list[bytes]()
    for i, rows in enumerate(episodes):
        steps = len(rows["valid"]) - 1
        acted: Batch = tree.take({key: x for key, x in rows.items() if key not in SKIPPED}, slice(0, steps))
        line: dict[str, Any] = {"type": "SampleBatch", "eps_id": [eps_id(path, i)] * steps, "t": [*range(steps)]}
        for key, part in (("obs", slice(0, steps)), ("new_obs", slice(1, steps + 1))):
            line[key] = _written(tree.map(np.ascontiguousarray, tree.take(rows["obs"], part)), about["compress"])
        for key, leaf in acted.items():
            line[COLUMNS.get(key, key)] = _written(leaf, compress=False)
            if key not in COLUMNS:  # with the final row, as in ``obs``
                line[f"new_{key}"] = _written(tree.take(rows[key], slice(1, steps + 1)), compress=False)
        if "logp" in acted:  # read by RLlib's estimators
            line["action_prob"] = _written(np.exp(acted["logp"].astype(np.float64)), compress=False)
        lines.append(json.dumps(line).encode() + b"\n")
    atomic.replace(path.with_name(path.name + SPACES), json.dumps({"leaves": leaves, **about}).encode())
    atomic.replace(path, b"".join(lines))


def eps_id(path: Path, i: int) -> int:
    """Return an episode number that is unique among all writers to a folder, whose files form one dataset.

    The file name identifies the run, the rank and the file.
    """
    return int.from_bytes(sha256(f"{path.stem} {i}".encode()).digest()[:8], "big") >> 2


def _written(leaf: Any, compress: bool) -> Any:
    if compress:
        lz4 = needs_package("lz4.frame", "record.compress=true")
        return base64.b64encode(lz4.compress(pickle.dumps(leaf))).decode("ascii")
    return tree.map(lambda x: x.tolist(), leaf)


@dataclass
class _Open:
    """An episode whose end has not been read yet.

    Attributes:
        parts: line, first and last transition of each part.
        after: next observation of its last transition, ``[1, ...]``; None: not in the file.
    """

    parts: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    total: float = 0.0
    after: Any = None

    @property
    def steps(self) -> int:
        return sum(high - low for _, low, high in self.parts)


class JsonSource:
    """A file of lines. It is scanned once when opened, to find episodes, then read line by line.

    Raises:
        ConfigError: a line is damaged, has several agents, or other spaces.
        OSError, ValueError: the file is damaged as a whole.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.reading = path, reading
        self._about = self._beside()
        self.spec: EnvSpec | None = spec_of(self._about["spec"]) if self._about else None
        self._offsets = [0]
        self._line = lru_cache(8)(self._parsed)
        self._episodes: list[tuple[list[tuple[int, int, int]], int]] = []
        self._returns, self._order = list[float](), Order()
        open_ones, keys, normalized = dict[Any, _Open](), None, not self._about
        with path.open("rb") as file:
            while raw := self._next(file):
                i = len(self._offsets) - 1
                self._offsets.append(self._offsets[-1] + len(raw))
                try:
                    if not raw.strip():
                        continue
                    columns = self._decode(raw)
                    check_rows(columns)
                    check_finite(columns)
                    self._add(i, columns, open_ones)
                except (ValueError, KeyError, TypeError, EOFError, RuntimeError, OverflowError) as error:
                    reading.lost(f"{path}, line {i + 1}", _why(error))
                    open_ones.clear()
                    continue
                keys = {*columns} if keys is None else keys & {*columns}
                if not self._about:
                    check_observations(columns, reading, path)
                    action = checked_actions(columns["action"], reading, path)
                    normalized = normalized and reading.looks_normalized(action)
        self._order.check()
        for one in open_ones.values():
            self._end(one, False, False)
        if note := self._order.note(path, len(self._episodes)):
            reading.note(note)
        self.normalized = normalized and keys is not None
        self.returns = np.array(self._returns, np.float64)
        self.lengths = np.array([steps for _, steps in self._episodes], np.int64)
        self.chunks = [range(i, i + 1) for i in range(len(self._episodes))]
        flags = {"terminated", "truncated", "is_first", "valid"}
        kept = [key for key in keys or () if not key.startswith(("new_", "next_"))]
        self.keys = frozenset({*kept, *flags} - {"episode"})

    def _next(self, file: BinaryIO) -> bytes:
        """Return the next line; empty: the file has ended.

        Raises:
            ConfigError: it is too long, or zeros, as in a hole of a file.
        """
        pieces, size = list[bytes](), 0
        while not (pieces and pieces[-1].endswith(b"\n")) and (piece := file.readline(PIECE)):
            pieces.append(piece)
            size += len(piece)
            if size > LINE or not piece.strip(b"\x00"):
                said = f"is longer than {LINE >> 20:,} MiB" if size > LINE else "is not text"
                raise refused(self.path, f"cannot be read: line {len(self._offsets)} {said}")
        return b"".join(pieces)

    def _beside(self) -> dict[str, Any]:
        """Return the content of the accompanying file of spaces; empty for files of other libraries.

        Raises:
            ConfigError: it is damaged.
        """
        beside = self.path.with_name(self.path.name + SPACES)
        if not os.path.lexists(beside):
            return {}
        try:
            if not beside.is_file() or beside.stat().st_size > BESIDE:
                raise ValueError("it is not a regular file of that kind")
            about = json.loads(beside.read_bytes())
            if not isinstance(about, dict):
                raise ValueError("it is not an object")
            check_leaves(about["leaves"])
            spec_of(about["spec"])
        except (OSError, ValueError, KeyError, RecursionError) as error:
            said = f"cannot be read: {_why(error)}; it describes the columns of {self.path.name}"
            raise refused(beside, said) from None
        return about

    def _add(self, i: int, columns: Batch, open_ones: dict[Any, _Open]) -> None:
        """Add the transitions of line ``i`` to their episodes."""
        number, over = columns.get("episode"), ends(columns, len(columns["reward"]))
        number = None if number is None else np.reshape(number, -1)
        apart = np.zeros(len(over), np.bool_)
        if "next_obs" in columns:
            apart = self._order.add(columns, over, number, len(over) + 1)
        for low, high in cut(over | apart, number):
            key = None if number is None else number[low].item()
            one = open_ones.setdefault(key, _Open())
            if one.after is not None and not equal(one.after, tree.take(columns["obs"], slice(low, low + 1))).all():
                self._order.apart += 1
                self._end(one, True, False)
                one = open_ones[key] = _Open()
            one.parts.append((i, low, high))
            one.total += float(np.sum(columns["reward"][low:high], dtype=np.float64))
            one.after = tree.take(columns["next_obs"], slice(high - 1, high)) if "next_obs" in columns else None
            if over[high - 1] or apart[high - 1]:
                terminated = "terminated" in columns and bool(columns["terminated"][high - 1])
                self._end(open_ones.pop(key), True, terminated)

    def _end(self, one: _Open, ended: bool, terminated: bool) -> None:
        where = f"{self.path}, the episode that begins in line {one.parts[0][0] + 1},"
        kept = length_of(one.steps, ended, terminated, one.after is not None, self.reading, where)
        if kept:
            self._episodes.append((one.parts, kept))
            self._returns.append(one.total)

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        parts, steps = self._episodes[chunk]
        pieces = [tree.take(self._line(i), slice(low, high)) for i, low, high in parts]
        columns = pieces[0] if len(pieces) == 1 else tree.cat(pieces)
        if not self._about:
            return [stream(columns, steps, self.reading, self.path)]
        own = Reading(None)  # rlplug's own spaces and dtypes
        rows = stream(columns, steps, own, self.path)
        typed: Batch = {}
        for leaf in self._about["leaves"]:
            found, source, final = rows, columns, columns
            for i, key in enumerate(leaf["path"]):
                found = found.get(key) if isinstance(found, dict) else None
                source, final = source.get(key, {}), final.get(key if i else f"new_{key}", {})
            found = np.concatenate((source, final[-1:])) if found is None else found
            put(typed, leaf["path"], np.asarray(found, leaf["dtype"]).reshape(steps + 1, *leaf["shape"]))
        check_stream(typed, np.array([steps]), self.spec)
        return [typed]

    def _parsed(self, line: int) -> Batch:
        with self.path.open("rb") as file:
            file.seek(self._offsets[line])
            return self._decode(file.read(self._offsets[line + 1] - self._offsets[line]))

    def _decode(self, raw: bytes) -> Batch:
        """Return the columns of a line as arrays, by rlplug's key names; other names are unchanged."""
        try:
            line = json.loads(raw)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(line, dict):
            raise ValueError("it is not an object")
        if line.pop("type", "SampleBatch") != "SampleBatch":
            raise refused(self.path, "has several agents (MultiAgentBatch), which JSON lines do not support")
        own = {new + leaf["path"][0] for leaf in self._about.get("leaves", ()) for new in ("", "new_")}
        columns = {key: _read(value) for key, value in line.items() if key in CALLED or key in own}
        found = named({k: v for k, v in columns.items() if v is not None}, self.path)
        return found | {key: columns[key] for key in own if key in columns and key not in found}


def _read(value: Any) -> Any:
    """Return a column as an array ``[n, ...]`` or a dict of arrays; None: not a column."""
    if isinstance(value, str):
        value = unpack(value)
    if isinstance(value, dict):
        return {key: _read(part) for key, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str):  # rows compressed individually
        return np.stack([_read(row) for row in value])
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" and array.ndim else None


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # its text counts lines within this line
        return f"{error.msg} at character {error.pos + 1}"
    if isinstance(error, KeyError):
        return f"it has no {shown(error.args[0])!r}"
    return why(error)

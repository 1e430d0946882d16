"""JSON lines as RLlib writes them: a line is a ``SampleBatch``, whose columns may be compressed.

A compressed column is base64 of LZ4 of a pickled array. Only arrays are unpickled; nothing else is ever executed.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.checkpointing import atomic
from rlplug.data.source import Reading, needs_package, refused
from rlplug.data.transitions import CALLED, check_rows, cut, ends, length_of, named, stream
from rlplug.envs.spec_json import from_json
from rlplug.types import Batch, CheckpointError, EnvSpec

SPACES = ".spaces"  # ends the name of the file beside one of rlplug's own, which says what its columns are
COLUMNS = {
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "logp": "action_logp",
}
"""what RLlib calls columns"""
SKIPPED = ("is_first", "valid", "obs")
ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


def write(path: Path, episodes: Sequence[Batch], about: Mapping[str, Any]) -> None:
    """Write an episode to a line; each file is complete or absent.

    Args:
        episodes: rows of each, arrays ``[L + 1, ...]``.
        about: what is written beside the file: ``spec``, ``versions``; ``compress``: whether observations are.

    Raises:
        ConfigError: LZ4 is not installed.
        OSError: the disk refuses.
    """
    leaves = [{"path": [*key], "dtype": x.dtype.name, "shape": [*x.shape[1:]]} for key, x in tree.items(episodes[0])]
    number, lines = int(path.stem.rpartition("-")[2] or 0), list[bytes]()
    for i, rows in enumerate(episodes):
        steps = len(rows["valid"]) - 1
        acted: Batch = tree.take({key: x for key, x in rows.items() if key not in SKIPPED}, slice(0, steps))
        line: dict[str, Any] = {"type": "SampleBatch", "eps_id": [number * 10**6 + i] * steps, "t": [*range(steps)]}
        for key, part in (("obs", slice(0, steps)), ("new_obs", slice(1, steps + 1))):
            line[key] = _written(tree.map(np.ascontiguousarray, tree.take(rows["obs"], part)), about["compress"])
        for key, leaf in acted.items():
            line[COLUMNS.get(key, key)] = _written(leaf, compress=False)
            if key not in COLUMNS:  # the final observation's, too, as of ``obs``
                line[f"new_{key}"] = _written(tree.take(rows[key], slice(1, steps + 1)), compress=False)
        lines.append(json.dumps(line).encode() + b"\n")
    atomic.replace(path.with_name(path.name + SPACES), json.dumps({"leaves": leaves, **about}).encode())
    atomic.replace(path, b"".join(lines))


def _written(leaf: Any, compress: bool) -> Any:
    if compress:
        lz4 = needs_package("lz4.frame", "record.compress=true")
        return base64.b64encode(lz4.compress(pickle.dumps(leaf))).decode("ascii")
    return tree.map(lambda x: x.tolist(), leaf)


class JsonSource:
    """A file of lines. It is read once when it is opened, to see where episodes lie; then line by line.

    Raises:
        ConfigError: a line is damaged, of several agents, or of other spaces.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.reading = path, reading
        self._offsets = [0]
        beside = path.with_name(path.name + SPACES)
        try:
            self._about: dict[str, Any] = json.loads(beside.read_bytes()) if beside.exists() else {}
        except (OSError, ValueError) as error:
            said = f"cannot be read: {_why(error)}; it says what the columns of {path.name} are"
            raise refused(beside, said) from None
        self._line = lru_cache(8)(self._parsed)
        open_parts: dict[Any, list[tuple[int, int, int]]] = {}
        done: list[tuple[list[tuple[int, int, int]], int]] = []
        returns, total, keys = list[float](), dict[Any, float](), None
        with path.open("rb") as file:
            for i, raw in enumerate(file):
                self._offsets.append(self._offsets[-1] + len(raw))
                if not raw.strip():
                    continue
                try:
                    columns = self._decode(raw)
                    check_rows(columns, n := len(columns["reward"]))
                except (ValueError, KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
                    reading.lost(f"{path}, line {i + 1}", _why(error))
                    open_parts.clear()
                    total.clear()
                    continue
                keys = {*columns} if keys is None else keys & {*columns}
                over, number = ends(columns, n), columns.get("episode")
                for low, high in cut(over, number):
                    key = None if number is None else number[low].item()
                    open_parts.setdefault(key, []).append((i, low, high))
                    total[key] = total.get(key, 0.0) + float(np.sum(columns["reward"][low:high], dtype=np.float64))
                    if over[high - 1]:
                        parts = open_parts.pop(key)
                        terminated = bool("terminated" in columns and columns["terminated"][high - 1])
                        steps = sum(b - a for _, a, b in parts)
                        done.append((parts, length_of(steps, True, terminated, "next_obs" in columns, reading, "")))
                        returns.append(total.pop(key))
        for key, parts in open_parts.items():
            steps, where = (
                sum(b - a for _, a, b in parts),
                f"{path}, the episode that begins in line {parts[0][0] + 1},",
            )
            if kept := length_of(steps, False, False, "next_obs" in (keys or ()), reading, where):
                done.append((parts, kept))
                returns.append(total[key])
        self._episodes = [(parts, steps) for parts, steps in done if steps]
        self.returns = np.array([x for x, (_, steps) in zip(returns, done, strict=True) if steps], np.float64)
        self.lengths = np.array([steps for _, steps in self._episodes], np.int64)
        self.chunks = [range(i, i + 1) for i in range(len(self._episodes))]
        flags = {"terminated", "truncated", "is_first", "valid"}
        kept = [key for key in keys or () if not key.startswith(("new_", "next_"))]
        self.keys = frozenset({*kept, *flags} - {"episode"})

    @property
    def spec(self) -> EnvSpec | None:
        try:
            return from_json(self._about["spec"])
        except (CheckpointError, KeyError):
            return None

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        parts, steps = self._episodes[chunk]
        pieces = [tree.take(self._line(i), slice(low, high)) for i, low, high in parts]
        columns = pieces[0] if len(pieces) == 1 else tree.cat(pieces)
        if not self._about:
            return [stream(columns, steps, self.reading, self.path)]
        own = Reading(None)  # as rlplug has them inside, of types that are known
        rows = stream(columns, steps, own, self.path)
        for leaf in self._about["leaves"]:
            *parents, name = leaf["path"]
            source, final, target = columns, columns, rows
            for i, key in enumerate([*parents, name]):
                source, final = source.get(key, {}), final.get(key if i else f"new_{key}", {})
            for parent in parents:
                target = target.setdefault(parent, {})
            if name not in target:
                target[name] = np.concatenate((source, final[-1:]))
            target[name] = np.asarray(target[name], leaf["dtype"]).reshape(steps + 1, *leaf["shape"])
        return [rows]

    def _parsed(self, line: int) -> Batch:
        with self.path.open("rb") as file:
            file.seek(self._offsets[line])
            return self._decode(file.read(self._offsets[line + 1] - self._offsets[line]))

    def _decode(self, raw: bytes) -> Batch:
        """Return the columns of a line as arrays, by rlplug's names; others as they are called."""
        line = json.loads(raw)
        if not isinstance(line, dict):
            raise ValueError("it is no object")
        if line.pop("type", "SampleBatch") != "SampleBatch":
            raise refused(self.path, "is of several agents (MultiAgentBatch), which JSON lines are not read of")
        own = {new + leaf["path"][0] for leaf in self._about.get("leaves", ()) for new in ("", "new_")}
        columns = {key: _read(value) for key, value in line.items() if key in CALLED or key in own}
        found = named({k: v for k, v in columns.items() if v is not None}, self.path)
        return found | {key: columns[key] for key in own if key in columns and key not in found}


def _read(value: Any) -> Any:
    """Return a column as an array ``[n, ...]`` or a dict of them; None: it is none."""
    if isinstance(value, str):
        lz4 = needs_package("lz4.frame", "a compressed column")
        value = _Arrays(io.BytesIO(lz4.decompress(base64.b64decode(value, validate=True)))).load()
    if isinstance(value, dict):
        return {key: _read(part) for key, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str):  # rows that are compressed one by one
        return np.stack([_read(row) for row in value])
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" and array.ndim else None


class _Arrays(pickle.Unpickler):
    """Loads arrays, and containers of them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, and only arrays are read")
        return super().find_class(module, name)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # its own text counts lines within the line
        return f"{error.msg} at character {error.pos + 1}"
    return str(error).partition("\n")[0] or type(error).__name__

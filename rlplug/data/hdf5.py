"""HDF5 files of D4RL and Minari, read without following links or external storage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.data.arrays import CHUNK, FlatSource, grouped
from rlplug.data.order import equal
from rlplug.data.source import Reading, check_size, needs_package, why
from rlplug.data.transitions import (
    CALLED,
    NUMBERS,
    check_finite,
    check_observations,
    check_rows,
    checked_actions,
    ends,
    length_of,
    named,
    stream,
)
from rlplug.types import Batch, EnvSpec

DEPTH = 8  # maximum depth of nested groups
OF_LOGP = ("logp", "action_logp", "action_log_probs")  # names of log-probabilities in infos of Minari and D4RL
EPISODE = re.compile(r"episode_(\d{1,18})")


def hdf5_source(path: Path, reading: Reading) -> FlatSource | MinariSource:
    """Open an HDF5 file of D4RL or Minari.

    Raises:
        ConfigError, OSError, ValueError: the file is invalid.
    """
    file = needs_package("h5py", str(path)).File(path, "r")
    if any(EPISODE.fullmatch(name) for name in file):
        return MinariSource(path, reading, file)
    columns = _columns(file, path)
    return FlatSource(path, reading, columns)


class MinariSource:
    """Episodes in Minari's format: one group per episode, with one more observation than actions."""

    spec: EnvSpec | None = None

    def __init__(self, path: Path, reading: Reading, file: Any) -> None:
        self.path, self.reading, self.file = path, reading, file
        self._episodes: list[tuple[str, int]] = []
        keys, returns, self.normalized, row = None, list[float](), True, 1
        for name in sorted(filter(EPISODE.fullmatch, file), key=lambda name: int(name[8:])):
            where = f"{path}, {name},"
            try:
                group = self._group(name)
                n = check_rows(group, final=1)
                check_finite(group)
                if "next_obs" in group and not equal(group["next_obs"], tree.take(group["obs"], slice(1, None))).all():
                    raise ValueError("has next observations that are not the observations of the next rows")
                over = ends(group, n)
            except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
                reading.lost(where, why(error))
                continue
            if n and length_of(n, bool(over[-1]), True, True, reading, where):
                self._episodes.append((name, n))
                returns.append(float(np.asarray(group["reward"], np.float64).sum()))
                keys = {*group} if keys is None else keys & {*group}
                row = max(row, sum(leaf[:1].nbytes for leaf in tree.leaves(group)))
                check_observations(group, reading, path)
                action = checked_actions(group["action"], reading, path)
                self.normalized = self.normalized and reading.looks_normalized(action)
        self.lengths = np.array([n for _, n in self._episodes], np.int64)
        self.returns = np.array(returns)
        flags = {"terminated", "truncated", "is_first", "valid"}
        self.keys = frozenset({*keys, *flags} - {"episode", "next_obs"}) if keys else frozenset[str]()
        self.chunks = grouped(self.lengths, max(1, CHUNK // row))

    def _group(self, name: str) -> Batch:
        """Return the arrays of an episode, by rlplug's key names."""
        group = tree.map(np.asarray, named(_columns(_held(self.file, name), self.path), self.path))
        if "logp" in group:  # Minari's infos include a row of the first observation
            group["logp"] = group["logp"][: len(group["reward"])]
        return group

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        part, rows = self.chunks[chunk], list[Batch]()
        for name, steps in self._episodes[part.start : part.stop]:
            rows.append(stream(self._group(name), steps, self.reading, self.path))
        return rows


def _columns(group: Any, path: Path) -> dict[str, Any]:
    """Return the datasets of a group that are columns, by name; of ``infos`` only log-probabilities.

    Raises:
        ValueError: one is stored externally, or declares far more bytes than the file can hold.
    """
    h5py, size = needs_package("h5py", str(path)), 0
    if not isinstance(group, h5py.Group):  # iterating over a dataset would yield its elements
        raise ValueError("has a dataset where a group is expected")
    found = {name: item for top in group if top in CALLED for name, item in _walk(_held(group, top), top)}
    if "infos" in group and isinstance(infos := _held(group, "infos"), h5py.Group):
        for name in filter(infos.__contains__, OF_LOGP):
            found["logp"] = _held(infos, name)
    for name, item in found.items():
        if not isinstance(item, h5py.Dataset) or item.dtype.kind not in NUMBERS:
            raise ValueError(f"has no numbers in {name!r}")
        if item.external or item.is_virtual:
            raise ValueError(f"keeps {name!r} in another file, but only its own contents are read")
        piece = np.prod([float(side) for side in item.chunks or ()]) * item.dtype.itemsize
        size += max(item.size * item.dtype.itemsize if item.shape else 0, int(piece))
    check_size(path, size, in_memory=False)
    return {name: item for name, item in found.items() if item.shape}


def _walk(item: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if not hasattr(item, "keys"):
        yield name, item
        return
    if depth == DEPTH:
        raise ValueError(f"has groups in groups below {name!r}, more than {DEPTH} of them")
    for part in item:
        yield from _walk(_held(item, part), f"{name}/{part}", depth + 1)


def _held(group: Any, name: str) -> Any:
    """Return a member that is stored in the group itself.

    Raises:
        ValueError: it is an external link.
    """
    h5py = needs_package("h5py", name)
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"has an external link at {name!r}, but only its own contents are read")
    return group[name]

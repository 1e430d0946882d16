"""A run as its folder records it."""

from __future__ import annotations

import csv
import fcntl
import json
import math
import os
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import yaml

from rlplug.checkpointing import atomic
from rlplug.config.errors import value_at
from rlplug.results.places import CONFIG, MANIFEST
from rlplug.script import name_of
from rlplug.types import STEP, CheckpointError, Unit

State: TypeAlias = Literal["running", "finished", "interrupted", "failed", "killed"]
Metrics: TypeAlias = dict[str, np.ndarray]

SUMMARY, LOCK, METRICS = "summary.json", "run.lock", "metrics.csv"
EVALUATION, TRAINING = "eval/return_mean", "episode/return"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ENDED = ("finished", "interrupted", "failed")
STATES = get_args(State)


@dataclass(frozen=True)
class RunRecord:
    """A run folder's settings, manifest and summary.

    Attributes:
        summary: empty for a run that has not ended.
        state: ``killed``: the run has not ended, and no process holds its lock.
    """

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    state: State

    @property
    def algo(self) -> str:
        return str(value_at(self.config, "algo.name"))

    @property
    def env(self) -> str:
        """Return the environment's id, or the name of its component if it has none."""
        return name_of(value_at(self.config, "env") or {})

    @property
    def forked(self) -> Mapping[str, Any]:
        """Return ``identity`` and ``step`` of the run and checkpoint that it was forked from; empty if it was not."""
        origin = self.manifest.get("forked")
        return origin if isinstance(origin, Mapping) else {}

    @property
    def command(self) -> list[str]:
        """Return the words of the command line; none for a run that was started from Python without any."""
        command = self.manifest.get("command")
        return [str(word) for word in command] if isinstance(command, list) else []

    @property
    def unit(self) -> Unit:
        """Return what the run's steps count; manifests of older runs do not say it."""
        is_updates = "eval/updates" in self.summary or self.manifest.get("unit") == "updates"
        return "updates" if is_updates else "env_steps"

    @property
    def steps(self) -> int:
        """Return the steps so far, as far as they are logged."""
        logged = max((int(curve[0, -1]) for curve in self.metrics.values()), default=0)
        ended = self.summary.get(self.unit)
        return ended if isinstance(ended, int) else logged

    @property
    def age_s(self) -> float:
        """Return the seconds since the run last wrote one of its files."""
        return max(0.0, time.time() - max(_changed(self.path / name) for name in (CONFIG, METRICS, SUMMARY)))

    @property
    def metrics(self) -> Metrics:
        """Return each metric's steps and finite values, ``[2, P]`` with P > 0."""
        return self._logged[0]

    @property
    def damage(self) -> str:
        """Return a line on rows of ``metrics.csv`` that are left out, or an empty string."""
        return self._logged[1]

    @cached_property
    def _logged(self) -> tuple[Metrics, str]:
        return read_metrics(self.path / METRICS)

    def last(self, metric: str) -> float | None:
        """Return a metric's value at the end of the run, or the last one that was logged."""
        value = self.summary.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        curve = self.metrics.get(metric)
        return None if curve is None else float(curve[1, -1])


def read(folder: Path) -> RunRecord:
    """Return the record of a run folder.

    Raises:
        CheckpointError: its settings or its manifest cannot be read.
    """
    config, manifest = _mapping(folder / CONFIG), _mapping(folder / MANIFEST)
    summary: Mapping[str, Any] = {}
    with suppress(CheckpointError):  # a run that was not ended has none
        summary = _mapping(folder / SUMMARY)
    status = summary.get("status")
    state: State = "running" if _is_locked(folder / LOCK) else status if status in ENDED else "killed"
    return RunRecord(folder, config, manifest, summary, state)


def read_metrics(path: Path) -> tuple[Metrics, str]:
    """Read the whole rows of a ``metrics.csv``.

    A row is whole if it has a number or nothing in each column, and its step does not fall below the row before.

    Returns:
        For each metric its steps and finite values, ``[2, P]``; a line on the rows that are left out, if any.
    """
    try:
        text = atomic.read(path).decode(errors="replace")
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} cannot be read: {error.strerror}"
    head, *lines = text.split("\n")
    names: list[str] = []
    with suppress(csv.Error):  # of bytes that are no text
        names = next(csv.reader([head.replace("\0", "")]), [])
    if "step" not in names:
        return {}, f"{path} has no column 'step'; none of its rows can be used" if text else ""
    at, found, bad, before = names.index("step"), {name: [] for name in names}, [], -math.inf
    open_end = lines.pop() if lines else ""  # a row that is being written, or was when its process was killed
    for number, line in enumerate(lines, 2):
        row = _numbers(line.rstrip("\r").split(","))
        step = row[at] if row and len(row) == len(names) else None
        if row is None or step is None or not before <= step < math.inf:
            bad.append(number)
            continue
        before = step
        for name, value in zip(names, row, strict=True):
            if value is not None and math.isfinite(value) and name != "step":
                found[name].append((step, value))
    if open_end:
        bad.append(len(lines) + 2)
    all_rows = len(lines) + bool(open_end)
    damage = f"{path}: {len(bad)} of {all_rows} rows are damaged and left out, first line {bad[0]}" if bad else ""
    return {name: np.array(curve).T for name, curve in found.items() if curve}, damage


def step_label(unit: Unit) -> str:
    """Return the label of an axis of steps."""
    return {"env_steps": "environment steps"}.get(unit, f"{STEP[unit]}s")


def _numbers(cells: list[str]) -> list[float | None] | None:
    """Return the numbers of a row, None for blanks; None if a cell is something else."""
    try:
        return [float(cell) if cell else None for cell in cells]
    except ValueError:
        return None


def _mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file.

    Raises:
        CheckpointError: it cannot be read, or is no mapping.
    """
    try:
        data = atomic.read(path)
        if path.suffix == ".json":
            content = json.loads(data)
        else:
            if b"*" in data and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, LOADER)):
                raise ValueError("it has an alias")  # a few lines of which can stand for more than fits into memory
            content = yaml.load(data, LOADER)
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path.parent} is damaged or was altered: {path.name}: {reason}") from None
    return content


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a lock on a file, without locking it."""
    layout, order = ("hhqqi", (0, 1, 2, 3, 4)) if sys.platform == "linux" else ("qqihh", (3, 4, 0, 1, 2))
    asked = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # type, whence, start, length, process of ``struct flock``
    question = struct.pack(layout, *(asked[order.index(i)] for i in range(5)))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        answer = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
        return answer[order[0]] != fcntl.F_UNLCK
    except OSError:  # the file system knows no locks
        return False
    finally:
        os.close(descriptor)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

"""Check that transitions are consecutive: each next observation equals the following row's observation."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplug import tree
from rlplug.types import Batch

CLOSE = 1e-6  # relative tolerance, because files store observations in different precisions
THROUGHOUT = 0.95  # fraction of the rows
FEW = 2  # rows too few to draw a conclusion
WAY = "where the rows are in order, leave next observations out"
SAMPLE = 10_000  # rows in which distinct observations are counted


class Order:
    """Compares the next observation of each transition with the observation of the following row.

    Attributes:
        rows: number of compared transitions.
        apart: number of them that are not continued by the following row, although their episode continues.
    """

    def __init__(self) -> None:
        self.rows = self.apart = 0
        self._moved = self._late = self._triples = self._early = self._firsts = self._firsts_moved = 0
        self._sample: list[np.ndarray] = []

    def add(self, columns: Batch, over: np.ndarray, number: np.ndarray | None, block: int) -> np.ndarray:
        """Return a mask ``[n]`` of transitions not continued by the following row, although their episode continues.

        Args:
            columns: ``obs`` and ``next_obs``, leaves ``[n, ...]``; parts of a file are added in order.
            over: mask of transitions that end an episode, ``[n]``.
            number: episode numbers, ``[n]``; None: not in the file.
            block: rows to read at a time.

        Raises:
            ValueError: observations and next observations differ in parts or shapes.
        """
        n = len(over)
        follows, stays, skips, still = (np.zeros(n, np.bool_) for _ in range(4))
        for low in range(0, n, block):
            high = min(low + block, n)
            obs, after = (
                tree.take(columns["obs"], slice(low, high + 2)),
                tree.take(columns["next_obs"], slice(low, high)),
            )
            for found, rows, shift in ((follows, after, 1), (stays, after, 0), (skips, after, 2), (still, obs, 1)):
                if (k := min(high, n - shift) - low) > 0:
                    a, b = tree.take(rows, slice(0, k)), tree.take(obs, slice(shift, shift + k))
                    found[low : low + k] = equal(a, b)
            if sum(map(len, self._sample)) < SAMPLE:
                self._sample.append(_flat(tree.take(obs, slice(0, min(high - low, SAMPLE)))))
        on = ~over & (np.arange(n) < n - 1)  # the episode continues in the following row
        if number is not None and n:
            on[:-1] &= number[1:] == number[:-1]
        apart, moved = on & ~follows, on & ~still
        first, triples = ~np.roll(on, 1), moved & np.roll(on, -1)
        self.rows, self.apart = self.rows + n, self.apart + int(apart.sum())
        self._moved += int(moved.sum())
        self._late += int((moved & apart & np.roll(stays, -1)).sum())
        self._triples += int(triples.sum())
        self._early += int((triples & apart & skips & ~stays).sum())
        self._firsts += int(first.sum())
        self._firsts_moved += int((first & ~stays).sum())
        return apart

    def check(self) -> None:
        """Check that next observations do not systematically belong to other rows.

        Raises:
            ValueError: they do.
        """
        if self._triples >= FEW and self._early >= THROUGHOUT * self._triples:
            said = "has next observations that are the observations two rows later, throughout: they are one row off"
            said += ", or the rows of two episodes alternate, and a column 'episode' must tell them apart"
            raise ValueError(f"{said}; {WAY}")
        if self._moved >= FEW and self._late >= THROUGHOUT * self._moved:
            # if states never change, any order is right; then there are few distinct states
            sample = np.concatenate(self._sample)[:SAMPLE]
            recur = len(np.unique(sample, axis=0)) <= len(sample) / 2
            if not recur or 2 * self._firsts_moved > self._firsts:
                said = "has next observations that are the observations of their own rows, throughout"
                raise ValueError(f"{said}: they are one row off; {WAY}")

    def note(self, path: Any, episodes: int) -> str | None:
        """Return a note on a file whose episodes were cut; None: it is in order."""
        if not self.apart:
            return None
        said = f"{path} is not in order: {self.apart:,} of {self.rows:,} transitions do not end with the observation of"
        return f"{said} the next row; it is cut there into {episodes:,} pieces, which are truncated episodes"


def equal(a: Any, b: Any) -> np.ndarray:
    """Return a mask of equal rows ``[n]``, in float32 precision.

    Raises:
        ValueError: parts or shapes differ.
    """
    parts, others = dict(tree.items(a)), dict(tree.items(b))
    if parts.keys() != others.keys():
        raise ValueError("has observations and next observations with different parts")
    same: Any = True
    for path, x in parts.items():
        x, y = np.asarray(x), np.asarray(others[path])
        if x.shape != y.shape:
            shapes = f"{[*x.shape[1:]]} and {[*y.shape[1:]]}"
            raise ValueError(f"has observations and next observations of different shapes, {shapes}")
        close = x == y
        if x.dtype.kind == y.dtype.kind == "f" and not close.all():
            x, y = x.astype(np.float64), y.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                close |= (np.abs(x - y) <= CLOSE * np.abs(x)) & np.isfinite(x)
        same = same & close.reshape(len(close), -1).all(1)
    return same


def _flat(obs: Any) -> np.ndarray:
    leaves = [np.asarray(x) for x in tree.leaves(obs)]
    return np.concatenate([x.reshape(len(x), -1).astype(np.float64) for x in leaves], 1)

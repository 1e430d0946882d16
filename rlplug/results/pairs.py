"""Pairs of runs that were forked from one checkpoint, whose difference is the effect of their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations

import numpy as np

from rlplug.results.groups import Group
from rlplug.results.html import cell, head, section, table
from rlplug.results.listing import number
from rlplug.results.record import RunRecord
from rlplug.results.statistics import paired_interval, pairing_gain, unpaired_interval

ABOUT = (
    "A fork and its run, or two forks of one checkpoint, are equal up to it and have the same random numbers "
    "afterwards. The difference is the mean over pairs of the first score less the second. The paired interval draws "
    "pairs, the other one draws the runs of both groups independently; both are 95 % bootstrap intervals. "
    "The last column is how many unpaired runs tell as much as one pair."
)


@dataclass(frozen=True)
class Pairing:
    """Two groups of runs, and the final scores ``[R]`` of their pairs."""

    first: Group
    second: Group
    x: np.ndarray
    y: np.ndarray


def pairings(groups: Sequence[Group], metric: str) -> list[Pairing]:
    """Return the pairs of finished runs of every two groups; groups without pairs are left out."""
    found: list[Pairing] = []
    for first, second in combinations(groups, 2):
        scores = [(a.last(metric), b.last(metric)) for a in first.runs for b in second.runs if paired(a, b)]
        if whole := [pair for pair in scores if None not in pair]:
            x, y = np.array(whole, dtype=float).T
            found.append(Pairing(first, second, x, y))
    return found


def paired(a: RunRecord, b: RunRecord) -> bool:
    """Return whether both runs have finished, and one was forked from the other or both from one checkpoint."""
    if a.state != "finished" or b.state != "finished":
        return False
    origins = [(run.forked.get("identity"), run.forked.get("step")) for run in (a, b)]
    if a.forked and origins[0] == origins[1]:
        return True
    return any(one.forked.get("identity") == other.manifest.get("run") for one, other in ((a, b), (b, a)))


def paired_differences(groups: Sequence[Group], metric: str) -> str:
    """Return the section of forks; empty if no run of the report is paired with another."""
    rows = [[head(f"{one.first.label} less {one.second.label}"), *_figures(one)] for one in pairings(groups, metric)]
    if not rows:
        return ""
    columns = ("", "pairs", "difference", "paired interval", "unpaired interval", "worth")
    return section("Forks", table(columns, rows, numbers=range(1, len(columns))), escape(ABOUT))


def _figures(pairing: Pairing) -> Iterator[str]:
    x, y = pairing.x, pairing.y
    yield cell(str(len(x)), True)
    yield cell(number(float(np.mean(x - y))), True)
    if len(x) < 2:
        yield from (cell("", True) for _ in range(3))
        return
    for interval in (paired_interval(x, y), unpaired_interval(x, y)):
        yield cell(" to ".join(map(number, interval)), True)
    yield cell(number(pairing_gain(x, y)), True)

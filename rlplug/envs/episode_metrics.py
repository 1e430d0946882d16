"""Metrics of an environment's own: what it puts in ``info["metrics"]``, averaged over each episode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from rlplug.envs.checking import MisfitError, column
from rlplug.types import EnvTraits, RunError

KEY = "metrics"
OWN = re.compile("return|length|return/.*|return_least_exploring")
"""metrics of episodes that rlplug logs itself"""
RESERVED = re.compile(f"{OWN.pattern}|return_(mean|std|min|max)|(length|success)_mean|episodes|env_steps|updates")
"""these and those of evaluations"""


class EpisodeMetrics:
    """Means over the steps of an episode that have a metric, of every column.

    A vector environment calls ``clear`` in ``reset``, ``add`` and ``end`` in ``step``, and has the trait
    ``EnvTraits(metrics=metrics.drain)``.
    """

    def __init__(self, columns: int) -> None:
        self._open: list[dict[str, tuple[float, int]]] = [{} for _ in range(columns)]  # sums and counts
        self.ended = list[tuple[int, dict[str, float]]]()  # since the last ``drain``

    def clear(self) -> None:
        """Drop all episodes, when every column is reset."""
        self._open, self.ended = [{} for _ in self._open], []

    def begin(self, i: int) -> None:
        """Begin an episode in column ``i``, whose last one was interrupted or has ended."""
        self._open[i] = {}

    def add(self, i: int, given: Any) -> None:
        """Add the metrics of one step of column ``i``.

        Raises:
            MisfitError: they are not a mapping of names to numbers, or have a name of rlplug's own metrics.
        """
        if not isinstance(given, Mapping):
            raise MisfitError(f"info['metrics'] is {type(given).__name__}; it should map names to numbers")
        if name := taken(given):
            raise MisfitError(f"info['metrics'] has {name!r}, which rlplug logs itself; use another name")
        for name, value in given.items():
            total, count = self._open[i].get(name, (0.0, 0))
            self._open[i][str(name)] = total + float(column(f"info['metrics'][{name!r}]", value, (), "fiub")), count + 1

    def end(self, i: int) -> None:
        """End the episode of column ``i``."""
        self.ended.append((i, {name: total / count for name, (total, count) in self._open[i].items()}))
        self._open[i] = {}

    def drain(self) -> list[tuple[int, dict[str, float]]]:
        """Return column and metrics of each episode that ended since the last call."""
        found, self.ended = self.ended, []
        return found


def taken(names: Iterable[Any]) -> str | None:
    """Return the first name that rlplug logs itself, as ``episode/<name>`` or ``eval/<name>``; None: there is none."""
    return next(filter(RESERVED.fullmatch, map(str, names)), None)


def drained(traits: EnvTraits) -> list[tuple[int, dict[str, float]]]:
    """Return column and metrics of each episode that ended since the last call; see ``EnvTraits.metrics``.

    Raises:
        RunError: one of them has the name of a metric that rlplug logs itself.
    """
    found = traits.metrics() if traits.metrics else []
    if name := next(filter(None, (taken(own) for _, own in found)), None):
        raise RunError(f"the environment's metrics have {name!r}, which rlplug logs itself; use another name")
    return found


def numbers(found: Any, whose: str, required: str = "") -> dict[str, float]:
    """Return the metrics that a user's function returned as numbers.

    Raises:
        RunError: it returned no dict, something else than numbers, or not the required one.
    """
    if not isinstance(found, Mapping):
        raise RunError(f"{whose} returned {type(found).__name__} instead of a dict of metrics")
    for name, value in found.items():
        if not _is_number(value):
            raise RunError(f"{whose} returned {name}={value!r}, which is not a number")
    if required not in ("", *found):
        raise RunError(f"{whose} returned no {required}")
    return {name: value if isinstance(value, int | float) else float(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        float(value)
        return not isinstance(value, str)
    return False

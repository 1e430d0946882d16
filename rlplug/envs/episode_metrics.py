"""Metrics of an environment's own: what it puts in ``info["metrics"]``, averaged over each episode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlplug.envs.checking import MisfitError, column

KEY = "metrics"
OWN = re.compile("return|length|return/.*|return_least_exploring")
"""metrics of episodes that rlplug logs itself"""


class EpisodeMetrics:
    """Means over the steps of an episode that have a metric, of every column."""

    def __init__(self, columns: int) -> None:
        self._open: list[dict[str, tuple[float, int]]] = [{} for _ in range(columns)]  # sums and counts
        self.ended = list[dict[str, float]]()  # of episodes that ended since the last ``drain``

    def begin(self, i: int) -> None:
        """Begin an episode in column ``i``."""
        self._open[i] = {}

    def add(self, i: int, given: Any) -> None:
        """Add the metrics of one step of column ``i``.

        Raises:
            MisfitError: they are not a mapping of names to numbers, or have a name of rlplug's own metrics.
        """
        if not isinstance(given, Mapping):
            raise MisfitError(f"info['metrics'] is {type(given).__name__}; it should map names to numbers")
        if taken := next(filter(OWN.fullmatch, map(str, given)), None):
            raise MisfitError(f"info['metrics'] has {taken!r}, which rlplug logs itself; use another name")
        for name, value in given.items():
            total, count = self._open[i].get(name, (0.0, 0))
            self._open[i][str(name)] = total + float(column(f"info['metrics'][{name!r}]", value, (), "fiub")), count + 1

    def end(self, i: int) -> None:
        """End the episode of column ``i``."""
        if self._open[i]:
            self.ended.append({name: total / count for name, (total, count) in self._open[i].items()})
            self._open[i] = {}

    def drain(self) -> list[dict[str, float]]:
        """Return the metrics of each episode that ended since the last call."""
        found, self.ended = self.ended, []
        return found

"""Limits of metrics at which a run ends early, by its setting ``stop``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rlplug.config import show
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError, RunError

WRONG = "is no limit: should be a number to reach, or '<0.1' to fall below"
METRICS = "env_steps, agent_steps, updates, or begin with eval/, train/ ..."
METRIC = re.compile(r"(env|agent)_steps|updates|(eval|episode|train|time|buffer|system|curriculum)/.+")


class Stopping:
    """Ends a run early when a metric reaches its limit (``stop``).

    Args:
        limits: by metric: a number to reach, or ``"<0.1"`` to fall below.
        watched: metrics that must exist too, and the keys that name them.

    Raises:
        ConfigError: there is no such metric, or no such limit.
    """

    def __init__(self, limits: Mapping[str, float | str], watched: Mapping[str, str] | None = None) -> None:
        self.limits, self.reason = dict[str, tuple[str, float]](), ""  # which limit was reached
        self.seen = set[str]()  # metrics with a value so far
        self.keys = {metric: f"stop.{metric}" for metric in limits} | dict(watched or {})
        for metric, key in self.keys.items():
            if not METRIC.fullmatch(metric):
                raise ConfigError(key, f"is no metric: should be {METRICS}")
            if metric not in limits and metric in ("env_steps", "updates"):
                raise ConfigError(key, f"{metric} is in no row of metrics; use curriculum=linear")
        for metric, limit in limits.items():
            found = re.fullmatch(r"([<>]?) *([-+.\de]+)", str(limit), re.I)
            if not found:
                raise ConfigError(f"stop.{metric}", f"{show(limit)} {WRONG}")
            self.limits[metric] = found[1] or ">", float(found[2])

    def notes(self) -> list[str]:
        """Return a line that names the limits, if any."""
        limits = (f"{metric} {sign.replace('>', '>=')} {limit:g}" for metric, (sign, limit) in self.limits.items())
        return [f"stops early at {' or '.join(limits)}"] * bool(self.limits)

    def require(self, row: Iterable[str], prefix: str | tuple[str, ...]) -> None:
        """Raise ``RunError`` if a limit or a curriculum reads a metric with a prefix that is not in ``row``."""
        if [*row] == ["eval/episodes"]:  # none was complete
            return
        if missing := next((name for name in self.keys if name.startswith(prefix) and name not in row), None):
            key = self.keys[missing]
            way = "; change stop when you resume" if key.startswith("stop.") else ""
            raise RunError(f"{key}: there is no such metric; {unknown(missing, row)}{way}")

    def read(self, row: Mapping[str, float]) -> None:
        """Compare a row of metrics with the limits."""
        self.seen |= row.keys()
        for metric in self.limits.keys() & row.keys():
            (sign, limit), value = self.limits[metric], row[metric]
            if not self.reason and (value < limit if sign == "<" else value >= limit):
                self.reason = f"{metric} reached {value:,.6g} (stop: {sign.replace('>', '>=')} {limit:,.6g})"

"""Schedules of values and of periodic events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def piecewise_linear(points: Sequence[tuple[float, float]], step: float) -> float:
    """Interpolate between points; constant before the first and after the last.

    Args:
        points: ``(step, value)``, at least one, by increasing step. If a step occurs twice, the value
            jumps there to that of the later point.
        step: where to evaluate.
    """
    after = bisect_right(points, step, key=lambda point: point[0])
    if after == 0:
        return float(points[0][1])
    start, low = points[after - 1]
    if after == len(points):
        return float(low)
    end, high = points[after]
    return float(low + (high - low) * (step - start) / (end - start))


def due(every: int, last: int, step: int) -> bool:
    """Return whether a multiple of ``every`` steps was reached after the step ``last``; never if ``every`` is 0."""
    return bool(every) and step // every > last // every

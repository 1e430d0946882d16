"""Schedules of values and of periodic events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


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


class Schedules:
    """Piecewise linear schedules as 0-d tensors, updated in place."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.step = device, 0
        self._moving: list[tuple[Tensor, Sequence[tuple[float, float]]]] = []

    def add(self, node: float | Sequence[tuple[float, float]]) -> Tensor:
        points = [(0, node)] if isinstance(node, int | float) else node
        value = torch.tensor(piecewise_linear(points, 0), device=self.device)
        if len(points) > 1:
            self._moving.append((value, points))
        return value

    def refresh(self, step: int) -> None:
        """Set every schedule to its value at ``step``, in place."""
        self.step = step
        for value, points in self._moving:
            value.fill_(piecewise_linear(points, step))

    def moving(self) -> Iterator[Tensor]:
        return (value for value, _ in self._moving)

    def following(self, points: Sequence[tuple[float, float]]) -> list[Tensor]:
        """Return the tensors of schedules with these points."""
        return [value for value, own in self._moving if own == points]

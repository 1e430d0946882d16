"""Search spaces in Hydra's syntax: ``algo.lr=interval(1e-5,1e-2)``, ``algo.gamma=0.95,0.99``, ``n=range(1,5)``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from rlplug.types import ConfigError

RATIO = 100.0  # of the ends of an interval of positive numbers, from which on it is sampled on a log scale


@dataclass(frozen=True)
class Choices:
    """Values in their order, as words of a command line."""

    values: Sequence[str]

    @property
    def ends(self) -> Sequence[str]:
        return self.values

    def sample(self, rng: np.random.Generator) -> str:
        return self.values[int(rng.integers(len(self.values)))]

    def perturbed(self, value: str, factors: Sequence[float], rng: np.random.Generator) -> str:
        """Return the value before or after ``value``; at an end, the one next to it."""
        at, last = self.values.index(value), len(self.values) - 1
        near = [i for i in (at - 1, at + 1) if 0 <= i <= last] or [at]
        return self.values[near[int(rng.integers(len(near)))]]


class Range(Choices):
    """Equally spaced numbers, from ``range(start,stop,step)``."""


@dataclass(frozen=True)
class Interval:
    """Numbers between two ends; integers if ``whole``."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> Sequence[str]:
        return self.word(self.low), self.word(self.high)

    def sample(self, rng: np.random.Generator) -> str:
        if self.log:
            return self.word(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self.word(rng.uniform(self.low, self.high))

    def perturbed(self, value: str, factors: Sequence[float], rng: np.random.Generator) -> str:
        """Return ``value`` times one of the ``factors``, inside the interval; another value in any case.

        An integer that no factor changes is moved by 1, and other values are drawn again.
        """
        tried = [float(value) * factors[i] for i in rng.permutation(len(factors))]
        tried += [float(value) + step for step in rng.permutation([-1.0, 1.0])] if self.whole else []
        return next((word for word in map(self.word, tried) if word != value), self.sample(rng))

    def word(self, value: float) -> str:
        """Return a value on the command line, moved into the interval."""
        inside = min(max(value, self.low), self.high)
        return str(round(inside)) if self.whole else repr(float(f"{inside:.6g}"))


Space = Choices | Interval


def spaces(overrides: Sequence[Override], values: Mapping[str, Sequence[str]]) -> dict[str, Space]:
    """Return the search space of every swept key; an interval between integers is one of integers.

    Args:
        values: words of the keys with single values.

    Raises:
        ConfigError: an interval is empty.
    """
    found: dict[str, Space] = {}
    for one in overrides:
        key, value = one.get_key_element(), one.value()
        if not isinstance(value, IntervalSweep):
            found[key] = (Range if isinstance(value, RangeSweep) and len(values[key]) > 1 else Choices)(values[key])
            continue
        low, high = float(value.start or 0), float(value.end or 0)
        if not low < high < math.inf:
            raise ConfigError(one.key_or_group, f"interval({low:g},{high:g}) is empty: write the smaller end first")
        whole = low.is_integer() and high.is_integer()
        log = low > 0 and ("log" in value.tags or high / low >= RATIO)
        found[key] = Interval(low, high, log, whole)
    return found


def sampled(space: Mapping[str, Space], rng: np.random.Generator) -> dict[str, str]:
    """Draw a value of every key."""
    return {key: one.sample(rng) for key, one in space.items()}


def perturbed(
    settings: Mapping[str, str],
    space: Mapping[str, Space],
    factors: Sequence[float],
    resample: float,
    rng: np.random.Generator,
) -> dict[str, str]:
    """Perturb every value, or draw it again with probability ``resample``."""
    return {
        key: space[key].sample(rng) if rng.random() < resample else space[key].perturbed(value, factors, rng)
        for key, value in settings.items()
    }


def words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]

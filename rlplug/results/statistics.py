"""Statistics of few runs, after "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (Agarwal et al.,
NeurIPS 2021).

``scores`` are the final scores of one method: for each task an array ``[R]`` over its runs, whose number may differ
between tasks. A bootstrap is stratified: it draws the runs of each task with replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

Scores: TypeAlias = Sequence[np.ndarray]
Interval: TypeAlias = tuple[float, float]

LEVEL = 0.95
REPS = 5_000
TRIMMED = 0.25  # of the scores at each end
MOST = 4_000_000  # scores drawn at a time


def iqm(scores: Scores) -> float:
    """Return the interquartile mean: the mean of the middle half of all scores of all tasks."""
    return float(_iqm(np.concatenate(scores)[None])[0])


def iqm_interval(scores: Scores, reps: int = REPS, seed: int = 0) -> Interval:
    """Return the 95 % interval of ``iqm`` by a stratified percentile bootstrap."""
    return interval(np.concatenate([_iqm(np.concatenate(drawn, 1)) for drawn in resampled([scores], reps, seed)]))


def improvement(x: Scores, y: Scores) -> float:
    """Return the probability that a run of ``x`` scores higher than one of ``y``, averaged over tasks.

    Ties count half, as in the Mann-Whitney U statistic.
    """
    return float(_improvement([task[None] for task in x], [task[None] for task in y])[0])


def improvement_interval(x: Scores, y: Scores, reps: int = REPS, seed: int = 0) -> Interval:
    """Return the 95 % interval of ``improvement``, with the runs of both methods drawn independently."""
    draws = resampled([x, y], reps, seed)
    return interval(np.concatenate([_improvement(drawn[: len(x)], drawn[len(x) :]) for drawn in draws]))


def paired_interval(x: np.ndarray, y: np.ndarray, reps: int = REPS, seed: int = 0) -> Interval:
    """Return the 95 % interval of the mean of ``x - y``, ``[R]`` each, by drawing pairs."""
    low, high = mean_band((x - y)[:, None], reps, seed)
    return float(low[0]), float(high[0])


def unpaired_interval(x: np.ndarray, y: np.ndarray, reps: int = REPS, seed: int = 0) -> Interval:
    """Return the 95 % interval of ``mean(x) - mean(y)``, by drawing the runs ``[R]`` of both independently."""
    return interval(np.concatenate([a.mean(1) - b.mean(1) for a, b in resampled([[x], [y]], reps, seed)]))


def pairing_gain(x: np.ndarray, y: np.ndarray) -> float:
    """Return how many unpaired runs tell as much about the mean difference as one pair, for scores ``[R]``.

    It is the variance of the difference of independent runs over that of paired ones (common random numbers).
    """
    spread = np.var(x - y, ddof=1)
    return float((np.var(x, ddof=1) + np.var(y, ddof=1)) / spread) if spread else float("inf")


def profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Return the share of all runs that score higher than each of ``thresholds [K]``."""
    return _profile(np.concatenate(scores)[None], thresholds)[0]


def profile_band(scores: Scores, thresholds: np.ndarray, reps: int = REPS, seed: int = 0) -> np.ndarray:
    """Return the pointwise 95 % band ``[2, K]`` of ``profile``."""
    draws = resampled([scores], reps, seed)
    return _percentiles(np.concatenate([_profile(np.concatenate(drawn, 1), thresholds) for drawn in draws]))


def mean_band(values: np.ndarray, reps: int = REPS, seed: int = 0) -> np.ndarray:
    """Return the pointwise 95 % band ``[2, P]`` of the mean of curves ``[R, P]``, by drawing whole curves."""
    runs = len(values)
    counts = np.random.default_rng(seed).multinomial(runs, np.full(runs, 1 / runs), size=reps)
    return _percentiles(counts @ values / runs)


def scaled(methods: Sequence[Scores]) -> list[Scores]:
    """Scale the scores of each task to [0, 1], by the worst and the best run of all methods.

    A task in which all runs score the same becomes 0.
    """
    ends = [(np.min(whole), np.max(whole)) for whole in map(np.concatenate, zip(*methods, strict=True))]
    return [
        [(x - low) / ((high - low) or 1.0) for x, (low, high) in zip(scores, ends, strict=True)] for scores in methods
    ]


def interval(draws: np.ndarray) -> Interval:
    """Return the percentiles of ``draws [reps]`` between which a statistic lies at ``LEVEL``."""
    low, high = _percentiles(draws)
    return float(low), float(high)


def resampled(methods: Sequence[Scores], reps: int, seed: int) -> Iterator[list[np.ndarray]]:
    """Yield draws ``[reps, R]`` for each task of each method, together ``reps`` of them."""
    rng, tasks = np.random.default_rng(seed), [task for scores in methods for task in scores]
    at_once = max(1, MOST // sum(map(len, tasks)))
    for first in range(0, reps, at_once):
        n = min(at_once, reps - first)
        yield [task[rng.integers(len(task), size=(n, len(task)))] for task in tasks]


def _iqm(scores: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of each row of ``scores [N, R]``."""
    cut = int(TRIMMED * scores.shape[1])
    return np.sort(scores, 1)[:, cut : scores.shape[1] - cut].mean(1)


def _improvement(x: Scores, y: Scores) -> np.ndarray:
    """Return ``improvement`` of each of N draws, where tasks are ``[N, R]``."""
    wins = [(a[:, :, None] > b[:, None]) + 0.5 * (a[:, :, None] == b[:, None]) for a, b in zip(x, y, strict=True)]
    return np.mean([task.mean((1, 2)) for task in wins], 0)


def _profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the shares ``[N, K]`` of each row of ``scores [N, R]`` above the thresholds."""
    return np.stack([(scores > threshold).mean(1) for threshold in thresholds], 1)


def _percentiles(draws: np.ndarray) -> np.ndarray:
    return np.percentile(draws, [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2], axis=0)

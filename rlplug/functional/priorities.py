"""Prioritized replay: proportional sampling and its importance weights (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def proportional(error: Any, alpha: float, epsilon: float) -> Any:
    """Return the unnormalized sampling probability of a transition, ``(|error| + epsilon)^alpha``, section 3.3."""
    return (abs(error) + epsilon) ** alpha


def importance_weights(prob: Tensor, count: Tensor | int, beta: Tensor | float) -> Tensor:
    """Return ``(N P(i))^-beta``, section 3.4, not yet divided by the largest one.

    Args:
        prob: probability with which each transition of the batch was sampled, ``[B]``.
        count: N, the number of transitions to sample from, ``[B]`` or one for all.
    """
    return (count * prob) ** -beta


def sequence_priority(error: Tensor, valid: Tensor, eta: float = 0.0) -> Tensor:
    """Mix the largest and the mean error of a sequence: ``eta max |error| + (1 - eta) mean |error|``.

    Kapturowski et al. 2019 (ICLR), section 2.3.

    Args:
        error: absolute errors ``[T, B]``.
        valid: ``[T, B]`` bool; other rows are ignored.
        eta: weight of the largest error.

    Returns:
        ``[B]``; 0 where no row is valid.
    """
    error = torch.where(valid, error, 0.0)
    mean = error.sum(0) / valid.sum(0).clamp(min=1)
    return mean if eta == 0.0 else eta * error.amax(0) + (1.0 - eta) * mean


class SumTree:
    """Samples items in proportion to their weights, in double precision: O(log size) per item.

    A binary tree in one array: node ``i`` is the sum of the nodes ``2i`` and ``2i + 1``, recomputed whenever one of
    them changes. So errors do not accumulate over updates, and the sums depend only on the current weights.

    Args:
        size: items per part.
        parts: number of parts; a sample comes from one part. Item ``i`` of part ``p`` has index ``p * stride + i``.
    """

    def __init__(self, size: int, parts: int = 1) -> None:
        self.stride, self.parts = _power_of_two(size), parts
        self._leaves = self.stride * _power_of_two(parts)
        self._sums = np.zeros(2 * self._leaves)

    @staticmethod
    def nbytes(size: int, parts: int = 1) -> int:
        """Return the bytes of a tree with ``parts`` times ``size`` items."""
        return 8 * 2 * _power_of_two(size) * _power_of_two(parts)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    @property
    def totals(self) -> Any:
        """Return the sum of every part, ``[parts]``."""
        first = self._leaves // self.stride
        return self._sums[first : first + self.parts]

    def __getitem__(self, index: Any) -> Any:
        return self._sums[self._leaves :][index]

    def set(self, index: Any, weight: Any) -> None:
        """Set the weights, at least 0, of items ``index [n]``. If an item occurs twice, its last weight counts."""
        sums, node = self._sums, index + self._leaves
        sums[node] = weight
        if len(node) == 1:  # the common case when a row is added; NumPy calls would take ten times as long
            (above,) = node.tolist()
            while (above := above // 2) > 0:
                sums[above] = sums[2 * above] + sums[2 * above + 1]
            return
        level = self._leaves
        while (level := level // 2) > len(node):
            node = node // 2
            sums[node] = sums[2 * node] + sums[2 * node + 1]
        while level > 0:  # the nodes from ``level`` to ``2 level``; fewer than there are items
            sums[level : 2 * level] = sums[2 * level : 4 * level : 2] + sums[2 * level + 1 : 4 * level : 2]
            level //= 2

    def draw(self, share: Any, part: Any = 0) -> Any:
        """Return the items ``[n]`` at ``share [n]``, in [0, 1], of the total of ``part [n]``, never one of weight 0.

        If the total is 0, the result is undefined.
        """
        node = np.full(len(share), self._leaves // self.stride) + part
        rest = share * self._sums[node]
        for _ in range(self.stride.bit_length() - 1):
            node *= 2
            left = self._sums[node]
            # a share of 1, or rounding, must not lead to weight 0
            right = (rest >= left) & (self._sums[node + 1] > 0)
            rest = rest - left * right
            node += right
        return node - self._leaves


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()

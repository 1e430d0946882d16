"""Prioritized replay: proportional sampling and its importance weights (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

WIDTH = 64
"""children of a node; what a draw reads of every level"""


def proportional(error: Any, alpha: float, epsilon: float) -> Any:
    """Return what a transition is drawn in proportion to: ``(|error| + epsilon)^alpha``, section 3.3."""
    return (abs(error) + epsilon) ** alpha


def importance_weights(prob: Tensor, count: int, beta: Tensor | float) -> Tensor:
    """Return ``(N P(i))^-beta``, section 3.4, not yet divided by the largest one.

    Args:
        prob: with what probability each transition of the batch was drawn, ``[B]``.
        count: N, how many could have been drawn.
    """
    return (count * prob) ** -beta


def sequence_priority(error: Tensor, valid: Tensor, eta: float = 0.0) -> Tensor:
    """Mix the largest and the mean error of a sequence: ``eta max |error| + (1 - eta) mean |error|``.

    Kapturowski et al. 2019 (ICLR), section 2.3.

    Args:
        error: absolute errors ``[T, B]``.
        valid: ``[T, B]`` bool; other rows do not count.
        eta: weight of the largest error.

    Returns:
        ``[B]``; 0 where no row is valid.
    """
    error = torch.where(valid, error, 0.0)
    mean = error.sum(0) / valid.sum(0).clamp(min=1)
    return mean if eta == 0.0 else eta * error.amax(0) + (1.0 - eta) * mean


class SumTree:
    """Weights of ``size`` items in double precision, drawn from in proportion: O(log size) for every item.

    A node is the sum of its ``WIDTH`` children, added up anew from left to right whenever one of them changes.
    So no error builds up over updates, and equal weights give equal sums whatever they were before.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels = [np.zeros((blocks, WIDTH)) for blocks in _blocks(size)]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that a tree of ``size`` items takes."""
        return sum(8 * WIDTH * blocks for blocks in _blocks(size))

    @property
    def total(self) -> float:
        return float(self._levels[-1][0].cumsum()[-1])

    def __getitem__(self, index: Any) -> Any:
        return self._levels[0].reshape(-1)[index]

    def set(self, index: Any, weight: Any) -> None:
        """Give the items ``index [n]`` new weights, at least 0. Of items that occur twice the last one counts."""
        self._levels[0].reshape(-1)[index] = weight
        for level, above in zip(self._levels, self._levels[1:], strict=False):
            index = index // WIDTH
            above.reshape(-1)[index] = level[index].cumsum(-1)[:, -1]

    def draw(self, share: Any) -> Any:
        """Return the items ``[n]`` under ``share [n]``, in [0, 1], of the total. None of them has weight 0.

        Where the total is 0 there is nothing to draw, and the result means nothing.
        """
        node, rest = np.zeros(1, np.int64), share * self.total
        for level in reversed(self._levels):
            ends = level[node].cumsum(-1)  # of the root there is one for all
            # a share of 1, or rounding, must not lead behind the node's last child that has a weight
            rest = np.minimum(rest, np.nextafter(ends[:, -1], 0.0))
            child = (ends > rest[:, None]).argmax(-1) if len(node) > 1 else ends[0].searchsorted(rest, "right")
            before = ends.reshape(-1)[np.arange(len(ends)) * WIDTH + child - 1]
            rest = rest - np.where(child > 0, before, 0.0)
            node = node * WIDTH + child
        return node


def _blocks(size: int) -> list[int]:
    """How many nodes have children on each level, the lowest one first."""
    blocks = [-(-size // WIDTH)]
    while blocks[-1] > 1:
        blocks.append(-(-blocks[-1] // WIDTH))
    return blocks

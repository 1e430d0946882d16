"""Metrics of an environment's own on a device, averaged over each episode without waiting for the host."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlplug import tree
from rlplug.envs.episode_metrics import KEY
from rlplug.types import Batch, Tree

KEPT = 32
"""episodes of a column that are kept until they are read, which evaluations and jobs do every 32 steps"""


class DeviceMetrics:
    """Means over the steps of an episode, like ``EpisodeMetrics``, of metrics that are tensors ``[B]``.

    Steps change tensors in place, so they may be part of a CUDA graph. ``drain`` is what ``EnvTraits.metrics`` needs.
    If it is not called for long, only the last 32 episodes of a column are left.
    """

    def __init__(self) -> None:
        self.tensors: Batch = {}  # of every metric: its sum, its count, and the means of ended episodes; their number

    def begin(self, like: Mapping[str, Tensor]) -> None:
        """Begin an episode in every column.

        Args:
            like: all metrics by name, with any values ``[B]``; ``{}``: there are none.
        """

        def zeros(*shape: int) -> Batch:
            return {name: x.new_zeros(*shape, len(x), dtype=torch.float64) for name, x in like.items()}

        with torch.inference_mode(False):  # allocated while acting, but read outside of it
            self.tensors = {"sum": zeros(), "count": zeros(), "means": zeros(KEPT)} if like else {}
            for x in like.values():
                self.tensors["ended"] = torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def add(self, given: Mapping[str, Tensor], going: Tensor, over: Tensor) -> None:
        """Add the metrics ``[B]`` of one step; NaN: a column has none in this step.

        Args:
            going: columns that this step did not reset, ``[B]`` bool.
            over: columns whose episode ended with this step, ``[B]`` bool.
        """
        if not self.tensors:
            return
        place = (self.tensors["ended"] % KEPT).unsqueeze(0)
        for name, total in self.tensors["sum"].items():
            count, means = self.tensors["count"][name], self.tensors["means"][name]
            if name in given:
                has = going & ~given[name].isnan()
                total.add_(torch.where(has, given[name].double(), 0.0))
                count.add_(has)
            means.scatter_(0, place, torch.where(over, total / count, means.gather(0, place)))
            total.masked_fill_(over, 0.0)
            count.masked_fill_(over, 0.0)
        self.tensors["ended"].add_(over)

    def state(self) -> Tree:
        """Return a copy of its state, under the key of metrics; ``{}``: there are none."""
        return {KEY: tree.map(torch.clone, self.tensors)} if self.tensors else {}

    def load(self, state: Tree) -> None:
        """Restore ``state``, which may have other keys. In place, because a captured graph reads this memory."""
        tree.map(Tensor.copy_, self.tensors, state.get(KEY, {}))

    def drain(self) -> list[tuple[int, dict[str, float]]]:
        """Return column and metrics of each episode that ended since the last call, by column."""
        if not self.tensors:
            return []
        counts, means = self.tensors["ended"].tolist(), {name: x.tolist() for name, x in self.tensors["means"].items()}
        self.tensors["ended"].zero_()
        episodes = ((b, i % KEPT) for b, n in enumerate(counts) for i in range(max(0, n - KEPT), n))
        each = ((b, {name: rows[i][b] for name, rows in means.items()}) for b, i in episodes)
        return [(b, {name: x for name, x in own.items() if not math.isnan(x)}) for b, own in each]

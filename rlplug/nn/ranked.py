"""Ranked rewards, R2: Laterre et al. 2018 (arXiv:1807.01672), which turn a problem of one player into self-play."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlplug.nn.module import Module
from rlplug.types import Batch


class RankedReturns(Module):
    """Keeps the returns of the last episodes, and ranks others by their percentile.

    Args:
        size: number of returns.
        columns: environments of the run.
        percentile: fraction of the returns to beat.
        best: a return that is always ranked 1; None: unknown.
    """

    scores: Tensor
    scored: Tensor
    running: Tensor
    threshold: Tensor

    def __init__(self, size: int, columns: int, percentile: float, best: float | None) -> None:
        super().__init__()
        self.percentile, self.best = percentile, torch.inf if best is None else best
        self.register_buffer("scores", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("scored", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("threshold", torch.full((), -torch.inf, dtype=torch.float64))

    def forward(self, score: Tensor, tie: Any) -> Tensor:
        """Return the ranked reward ``[n]`` of episodes with these returns: 1, -1, or ``tie``. R2, section 3."""
        z = torch.where(score < self.threshold, -1.0, torch.as_tensor(tie, dtype=torch.float32, device=score.device))
        return torch.where((score > self.threshold) | (score >= self.best), 1.0, z).float()

    def observe(self, batch: Batch, ids: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Add the returns of episodes that end in a segment ``[T+1, b]``.

        Args:
            ids: environments of its columns, ``[b]``.
            gather: returns the rows of all ranks.
        """
        valid = batch["valid"][:-1]
        over = valid & (batch["terminated"] | batch["truncated"])[:-1]
        now, found = self.running[ids], list[Tensor]()
        for t in range(len(valid)):
            now = torch.where(batch["is_first"][t], 0.0, now) + torch.where(valid[t], batch["reward"][t], 0.0)
            found.append(torch.where(over[t], now, torch.nan))
        self.running[gather(ids)] = gather(now)
        scores = gather(torch.stack(found, 1)).T.flatten()
        for score in scores[~scores.isnan()]:
            self.scores[self.scored % len(self.scores)] = score
            self.scored += 1
        if self.scored:
            self.threshold.fill_(self.scores[: int(self.scored)].quantile(self.percentile))

"""Returns and lengths of the episodes that were collected."""

from __future__ import annotations

import numpy as np

from rlplug.types import Batch, Tree


class Episodes:
    """Counts returns and lengths of the episodes in a stream of segments ``[T+1, B]``."""

    def __init__(self, num_envs: int) -> None:
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._finished: list[tuple[float, int, int]] = []

    def add(self, segment: Batch, columns: slice = slice(None)) -> int:
        """Count a segment of some columns, and return the number of its environment steps."""
        valid = segment["valid"][:-1].numpy()
        reward = np.where(valid, segment["reward"][:-1].numpy(), 0.0)
        ended = ((segment["terminated"] | segment["truncated"])[:-1].numpy()) & valid
        began = segment["is_first"][:-1].numpy() & valid  # after an end, or in place of an episode that broke off
        if not ended.any() and not began.any():
            self._return[columns] += reward.sum(0)
            self._length[columns] += valid.sum(0)
            return int(valid.sum())
        returns = self._return[columns] + reward.cumsum(0, dtype=np.float64)
        lengths = self._length[columns] + valid.cumsum(0)
        base_return, base_length = np.zeros_like(returns[0]), np.zeros_like(lengths[0])
        number = np.arange(len(self._return))[columns]
        for t, b in np.argwhere(ended | began):
            if began[t, b]:
                base_return[b], base_length[b] = returns[t, b] - reward[t, b], lengths[t, b] - 1
            if ended[t, b]:
                episode = float(returns[t, b] - base_return[b]), int(lengths[t, b] - base_length[b]), int(number[b])
                self._finished.append(episode)
                base_return[b], base_length[b] = returns[t, b], lengths[t, b]
        self._return[columns], self._length[columns] = returns[-1] - base_return, lengths[-1] - base_length
        return int(valid.sum())

    def add_whole(self, batch: Batch) -> None:
        """Count the episodes of a job, which belong to no environment of the run: -1."""
        returns, lengths = batch["return"].tolist(), batch["length"].tolist()
        self._finished += [(total, length, -1) for total, length in zip(returns, lengths, strict=True)]

    def drain(self) -> list[tuple[float, int, int]]:
        """Return (return, length, environment) of the episodes that ended since the last call, in time order."""
        finished, self._finished = self._finished, []
        return finished

    def forget(self) -> None:
        """Drop the episodes that have not ended: their environments were reset."""
        self._return, self._length = np.zeros_like(self._return), np.zeros_like(self._length)

    def state(self) -> Tree:
        return {"return": self._return, "length": self._length, "finished": self._finished}

    def load(self, state: Tree) -> None:
        self._return, self._length, self._finished = state["return"], state["length"], state["finished"]

"""Whole episodes, assembled from segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Buffer, Context, Data, RowLog, Segment
from rlplug.buffer import check_feedback
from rlplug.buffer.episodes import side_by_side
from rlplug.functional.returns import ended
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, RunError


class Episodes(Buffer):
    """Keeps episodes of ``L`` steps as their ``L + 1`` rows. A sample is a batch of episodes, one per column.

    Shorter episodes are padded to the longest with ``valid=False``. ``train_batch_size`` counts episodes. Off-policy
    algorithms get that many, sampled uniformly. On-policy ones get each episode once: all complete episodes, as soon
    as there are that many.

    Incomplete episodes, whose environment failed or was replaced, are dropped.
    """

    gives: ClassVar[frozenset[Data]] = frozenset({"episodes"})
    sequences: ClassVar[bool] = False
    size_key: ClassVar[str] = "buffer.capacity"

    @settings
    class Config:
        capacity: PositiveInt = option("Environment steps kept; an episode's final observation counts as one.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.ctx, self.capacity, self.device = ctx, cfg.capacity, torch.device("cpu")
        self.off_policy, columns = ctx.needs.off_policy, len(ctx.env_ids)
        self.share = ctx.num_envs // columns  # number of ranks that share the data
        self.size = ctx.batch_size // ctx.world_size
        if not self.off_policy and columns == ctx.num_envs:
            self.size = ctx.batch_size  # episodes per rank
        longest = ctx.spec.max_episode_steps
        least = (longest + 1 if longest else 2) * (columns + (1 if self.off_policy else self.size))
        if cfg.capacity // self.share < least:
            raise ConfigError(
                "buffer.capacity",
                f"{cfg.capacity} does not hold the episodes, of up to {longest or '?'} steps, that {ctx.num_envs}"
                f" environments collect and an update needs; at least {least * self.share} is needed",
            )
        self._open: list[list[Batch] | None] = [
            None
        ] * columns  # each column's open episode; None: wait for the next one
        self._ended = np.zeros(columns, np.bool_)  # the last segment ended with a final observation, already added
        self._episodes: deque[Batch] = deque()  # leaves [L+1, ...]
        self._first, self._start = 0, 0  # index of the oldest episode, and of its first row
        self._rows = 0  # of complete episodes
        self._open_rows = np.zeros(columns, np.int64)
        self._dropped = 0

    def add(self, segment: Segment) -> None:
        """Append a segment to the open episodes, and keep those that end.

        Raises:
            RunError: the open episodes exceed the capacity.
        """
        if segment.whole:
            self._add_whole(segment.batch)
            return
        batch, begin = segment.batch, segment.columns.indices(len(self._open))[0]
        final = np.zeros(batch["valid"].shape, np.bool_)
        final[1:] = ended(batch).numpy()
        valid, first = batch["valid"].numpy().copy(), batch["is_first"].numpy()
        valid[-1] = False
        for b in range(valid.shape[1]):
            self._add(begin + b, tree.take(batch, (slice(None), b)), valid[:, b], final[:, b], first[:, b])
        self._make_room()

    def _add_whole(self, batch: Batch) -> None:
        """Keep the episodes of a job, ``[L+1, episodes]``."""
        for b, length in enumerate(batch["valid"].sum(0).tolist()):
            self._episodes.append(tree.map(torch.clone, tree.take(batch, (slice(length + 1), b))))
            self._rows += length + 1
        self._make_room()

    def _add(self, column: int, rows: Batch, valid: Any, final: Any, first: Any) -> None:
        """Add rows ``[T+1, ...]`` of one column. Padding rows are neither valid nor final."""
        low = int(self._ended[column])  # its final observation is in the previous segment
        first = first.copy()
        first[-1] = False  # row T is row 0 of the next segment
        for at in [*np.flatnonzero(first | final).tolist(), len(valid)]:
            if at < low:
                continue
            is_final = at < len(valid) and final[at]
            high = at + 1 if is_final else at
            taken = low + np.flatnonzero((valid | final)[low:high])
            pieces = self._open[column]
            if pieces is not None and len(taken):
                pieces.append(tree.take(rows, torch.from_numpy(taken)))
                self._open_rows[column] += len(taken)
            if is_final:
                self._close(column)
            elif at < len(valid):
                self._dropped += bool(self._open_rows[column])  # incomplete
                self._open[column], self._open_rows[column] = [], 0
            low = high
        self._ended[column] = final[-1]

    def _close(self, column: int) -> None:
        pieces = self._open[column]
        self._open[column], self._open_rows[column] = None, 0
        if pieces is None:  # its start is missing
            return
        episode = tree.cat(pieces)
        episode["is_first"][0], episode["valid"][-1] = True, False
        self._episodes.append(episode)
        self._rows += len(episode["valid"])

    def _make_room(self) -> None:
        capacity = self.capacity // self.share
        while self._episodes and self._rows + self._open_rows.sum() > capacity:
            self._pop()
            self._dropped += not self.off_policy
        if self._open_rows.sum() > capacity:
            longest = int(self._open_rows.max())
            raise RunError(
                f"buffer.capacity={self.capacity} does not hold the open episodes: one has {longest}"
                " steps and has not ended; raise it, or limit an episode's steps"
            )

    def _pop(self) -> Batch:
        episode = self._episodes.popleft()
        self._first, self._start = self._first + 1, self._start + len(episode["valid"])
        self._rows -= len(episode["valid"])
        return episode

    def __len__(self) -> int:
        return len(self._episodes)

    def ready(self) -> bool:
        return len(self) > 0 if self.off_policy else len(self) >= self.size

    def sample(self) -> Batch:
        """Return ``[L+1, B]``, starting with ``is_first``, with ``index [B]``, episode numbers, and ``sample_prob``."""
        if self.off_policy:
            drawn = self.ctx.randint(len(self), self.size, host=True)
            episodes, prob = [self._episodes[i] for i in drawn.tolist()], 1.0 / len(self)
            index = self._first + drawn
        else:
            index, prob = self._first + torch.arange(len(self)), 1.0
            episodes = [self._pop() for _ in range(len(self))]
        batch = side_by_side([tree.map(lambda x: x.unsqueeze(1), episode) for episode in episodes])
        return batch | {"index": index, "sample_prob": torch.full((len(index),), prob)}

    def feedback(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Ignore priorities: sampling is uniform.

        Raises:
            RunError: ``values`` holds anything else.
        """
        check_feedback(self, values, ("priority",))

    def metrics(self) -> dict[str, float]:
        """Return the number of incomplete episodes, and of those dropped before use."""
        return {"dropped_episodes": self._dropped}

    def nbytes(self, row: Batch) -> int:
        return self.capacity // self.share * sum(leaf[0].nbytes for leaf in tree.leaves(row))

    def save(self, log: RowLog) -> None:
        """Save rows of complete episodes once, and those of open episodes each time."""
        lengths, start, new = list(self._lengths()), self._start, list[Batch]()
        for episode, length in zip(self._episodes, lengths, strict=True):
            if start >= log.end:
                new.append(episode)
            start += length
        if new:
            log.append(start - sum(len(episode["valid"]) for episode in new), tree.cat(new))
        log.trim(self._start)
        log.state = {
            "first": (self._first, self._start),
            "lengths": torch.tensor(lengths),
            "open": [pieces and [tree.cat(pieces)] for pieces in self._open],
            "ended": self._ended.copy(),
            "dropped": self._dropped,
        }

    def _lengths(self) -> Iterator[int]:
        return (len(episode["valid"]) for episode in self._episodes)

    def load(self, log: RowLog) -> None:
        if log.state is None:
            return
        state, saved, lengths = log.state, [*log.rows()], log.state["lengths"].tolist()
        (self._first, self._start), self._dropped = state["first"], state["dropped"]
        if len(state["open"]) != len(self._open):
            raise ValueError(f"the buffer has {len(self._open)} open episodes, and the saved one {len(state['open'])}")
        tree.check_like(self._ended, state["ended"], "buffer.ended", exact=True)
        self._open, self._ended = list(state["open"]), state["ended"].copy()
        self._open_rows[:] = [sum(len(piece["valid"]) for piece in pieces or ()) for pieces in self._open]
        if lengths:
            rows = tree.cat([tree.take(rows, slice(max(0, self._start - start), None)) for start, rows in saved])
            if sum(lengths) != len(rows["valid"]) or min(lengths) < 1:
                raise ValueError("the saved episodes have other numbers of rows than the buffer")
            ends = np.cumsum(lengths).tolist()
            for low, high in zip([0, *ends], ends, strict=False):
                self._episodes.append(tree.map(torch.clone, tree.take(rows, slice(low, high))))
        self._rows = sum(self._lengths())

"""Random streams, and the same numbers computed episode by episode from the definitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlplug.types import Batch

End = Literal["terminated", "truncated", "open"]


@dataclass(frozen=True)
class Episode:
    """Rows ``start .. start + length`` of a column, the last of which is the final observation or row T."""

    column: int
    start: int
    length: int
    end: End

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length + 1)


@dataclass(frozen=True)
class Stream:
    batch: Batch
    episodes: list[Episode]


def build(columns: list[list[tuple[int, End]]], transitions: int, seed: int) -> Stream:
    """Lay episodes ``(length, end)`` one behind the other into columns; the last one stays open.

    Rewards are junk where no transition begins. Column 0 begins within an episode.
    """
    shape = (transitions + 1, len(columns))
    generator = torch.Generator().manual_seed(seed)
    batch: Batch = {key: torch.zeros(shape, dtype=torch.bool) for key in ("terminated", "truncated", "is_first")}
    batch["valid"] = torch.ones(shape, dtype=torch.bool)
    batch["valid"][-1] = False
    batch["reward"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch["value"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch["obs"] = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    episodes: list[Episode] = []
    for column, parts in enumerate(columns):
        row = 0
        for length, end in [*parts, (transitions + 1, "open")]:
            if row > transitions:
                break
            batch["is_first"][row, column] = True
            fits = row + length <= transitions
            episode = Episode(column, row, length if fits else transitions - row, end if fits else "open")
            episodes.append(episode)
            row += episode.length
            batch["valid"][row, column] = False
            if episode.end != "open":
                batch[episode.end][row - 1, column] = True
            row += 1
    batch["is_first"][0, 0] = False
    batch["reward"][~batch["valid"]] = 1e6
    return Stream(batch, episodes)


ends: st.SearchStrategy[End] = st.sampled_from(["terminated", "truncated"])
streams = st.builds(
    build,
    columns=st.lists(st.lists(st.tuples(st.integers(1, 6), ends), max_size=6), min_size=1, max_size=3),
    transitions=st.integers(1, 20),
    seed=st.integers(0, 2**31),
)


def gae_of_episode(reward: Tensor, value: Tensor, end: End, gamma: float, lambda_: float) -> Tensor:
    """``sum_l (gamma lambda)^l delta_{t+l}`` of one episode; ``reward [L]``, ``value [L+1]``."""
    length = len(reward)
    follow = value[1:].clone()
    if end == "terminated":
        follow[-1] = 0.0
    delta = reward + gamma * follow - value[:-1]
    sums = [sum((gamma * lambda_) ** i * delta[t + i] for i in range(length - t)) for t in range(length)]
    return torch.stack(sums) if sums else delta


def n_step_of_episode(reward: Tensor, value: Tensor, end: End, gamma: float, n: int, t: int) -> Tensor:
    """The n-step target of step ``t`` of one episode."""
    k = min(n, len(reward) - t)
    target = sum((gamma**i * reward[t + i] for i in range(k)), torch.zeros_like(reward[0]))
    final = t + k == len(reward) and end == "terminated"
    return target if final else target + gamma**k * value[t + k]

"""Prioritized level replay: tasks with the most to learn from are played more often."""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, Curriculum, Learner, Segment
from rlplug.functional.returns import gae
from rlplug.settings import PositiveFloat, UnitFloat, option, settings
from rlplug.types import ConfigError, Tree


class PLR(Curriculum):
    """Prioritized level replay (Jiang et al. 2021, arXiv:2010.03934) of a ``Discrete`` space of tasks, the levels.

    The score of a level is the mean magnitude of the generalized advantage estimate in its last rows.

    Raises:
        ConfigError: tasks are not ``Discrete``, or the algorithm has no values.
    """

    @settings
    class Config:
        gamma: UnitFloat = option("Discount of the advantage estimates.")
        lambda_: UnitFloat = option("Weight of longer returns in the advantage estimates.")
        temperature: PositiveFloat = option("Temperature of the ranks of scores; lower: more of the highest scores.")
        staleness: UnitFloat = option("Weight of the time since a level was played, against that of its score.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if not isinstance(space := ctx.spec.tasks, Discrete):
            raise ConfigError("curriculum", f"plr replays numbered tasks, but the tasks are {space}; use another one")
        self.cfg, self.ctx, self.first, self.size = cfg, ctx, int(space.start), int(space.n)
        self.score: Tensor
        self.last: Tensor
        self.episodes: Tensor
        self.register_buffer("score", torch.zeros(self.size, dtype=torch.float64))
        self.register_buffer("last", torch.full((self.size,), -1))  # episodes of the run at the level's last; -1: none
        self.register_buffer("episodes", torch.tensor(0))

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Score the levels of a segment by its advantages, and count its episodes."""
        batch = tree.map(lambda x: x.to(self.ctx.device), segment.batch)
        try:
            with torch.no_grad():
                value = learner.algorithm.values(batch)
        except NotImplementedError:
            said = f"plr scores levels by values of observations, which {type(learner.algorithm).__name__} has not"
            raise ConfigError("curriculum", f"{said}; use another algorithm or curriculum") from None
        rows = batch["reward"], value, batch["terminated"], batch["valid"]
        advantage, _ = gae(*rows, self.cfg.gamma, self.cfg.lambda_)
        given = advantage.abs().double(), batch["task"] - self.first, batch["valid"], batch["is_first"]
        size, level, valid, is_first = (learner.gather(x.transpose(0, 1).contiguous()).cpu() for x in given)
        count = level[valid].bincount(minlength=self.size)
        total = torch.zeros_like(self.score).index_add(0, level[valid], size[valid])
        self.score.copy_(torch.where(count > 0, total / count.clamp(min=1), self.score))
        begun = level[valid & is_first].bincount(minlength=self.size)
        self.episodes += begun.sum()
        self.last.copy_(torch.where(begun > 0, self.episodes, self.last))

    @property
    def probs(self) -> Tensor:
        """Return the probability of every level, ``[levels]``: replayed ones share the part that was seen."""
        seen = self.last >= 0
        rank = torch.empty_like(self.score)
        order = torch.where(seen, self.score, -torch.inf).argsort(descending=True, stable=True)
        rank[order] = torch.arange(1, self.size + 1, dtype=rank.dtype)
        by_score = shares(torch.where(seen, rank ** (-1 / self.cfg.temperature), 0.0))
        age = torch.where(seen, self.episodes - self.last, 0).double()
        by_age = shares(age) if age.any() else by_score
        replay = (1 - self.cfg.staleness) * by_score + self.cfg.staleness * by_age
        part = seen.double().mean()
        return part * replay + (1 - part) * shares((~seen).double())

    def tasks(self) -> Tree:
        bounds = self.probs.cumsum(0)
        drawn = self.ctx.rand(self.ctx.num_envs, rows=False, host=True).double() * bounds[-1]
        return (self.first + torch.searchsorted(bounds, drawn, right=True).clamp(max=self.size - 1)).numpy()

    def metrics(self) -> dict[str, float]:
        levels = torch.arange(self.first, self.first + self.size, dtype=torch.float64)
        seen = (self.last >= 0).double()
        return {
            "task": float(self.probs @ levels),
            "seen": float(seen.mean()),
            "score": float(self.score @ shares(seen)),
        }


def shares(x: Tensor) -> Tensor:
    """Return ``x`` divided by its sum; zeros if that is 0."""
    return x / x.sum().clamp(min=torch.finfo(x.dtype).tiny)

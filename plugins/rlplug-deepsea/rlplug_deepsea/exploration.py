"""Exploration by counting, Strehl & Littman 2008; by hashed observations Tang et al. 2017 (arXiv:1611.04717)."""

import torch
from rlplug import Context, Exploration
from rlplug.nn import Flatten
from rlplug.settings import NonNegativeFloat, PositiveInt, Scheduled, option, settings


class Counts(Exploration):
    """The bonus ``beta / sqrt(N(s'))`` for a transition to ``s'``, which was visited ``N`` times.

    Observations are told apart by a linear hash, of which the table keeps ``slots`` values.
    """

    @settings
    class Config:
        beta: Scheduled[NonNegativeFloat] = option("Bonus of the first visit.")
        slots: PositiveInt = option("Size of the table; observations with the same hash share a count.")

    @classmethod
    def reads(cls, cfg, spec):
        """The keys of rows that it reads."""
        return ("obs",)

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.flatten, self.beta = Flatten(ctx.spec.single_agent.obs), ctx.schedule(cfg.beta)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("visits", torch.zeros(cfg.slots, dtype=torch.long))
        self.register_buffer("factors", torch.randint(2**31, (self.flatten.size,), generator=draw).double())

    def slots(self, batch):
        """Where in the table it is counted what the transitions ``[T, B]`` lead to."""
        hashed = (self.flatten(batch["obs"]).to(self.factors) * self.factors).sum(-1).round().long()
        return hashed[1:] % len(self.visits)

    def observe(self, segment, learner):
        """Count over all ranks."""
        found = learner.gather(self.slots(segment.batch)[segment.batch["valid"][:-1]])
        self.visits.index_add_(0, found, torch.ones_like(found))

    def intrinsic_reward(self, batch):
        bonus = self.beta * self.visits[self.slots(batch)].clamp(min=1).float().rsqrt()
        bonus = torch.where(batch["valid"][:-1], bonus, 0.0)
        return torch.cat((bonus, torch.zeros_like(bonus[:1])))

"""Count-based exploration, Strehl & Littman 2008, with hashed observations, Tang et al. 2017 (arXiv:1611.04717)."""

import torch
from rlplug import Context, Exploration
from rlplug.nn import Flatten
from rlplug.settings import NonNegativeFloat, PositiveInt, Scheduled, option, settings


class Counts(Exploration):
    """Adds the bonus ``beta / sqrt(N(s'))`` to a transition to ``s'``, which was visited ``N`` times.

    A linear hash maps observations to ``slots`` table entries.
    """

    @settings
    class Config:
        beta: Scheduled[NonNegativeFloat] = option("Bonus of the first visit.")
        slots: PositiveInt = option("Size of the table; observations with the same hash share a count.")

    @classmethod
    def reads(cls, cfg, spec):
        """Return the row keys that it reads."""
        return ("obs",)

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.flatten, self.beta = Flatten(ctx.spec.single_agent.obs), ctx.schedule(cfg.beta)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("visits", torch.zeros(cfg.slots, dtype=torch.long))
        self.register_buffer("factors", torch.randint(2**31, (self.flatten.size,), generator=draw).double())

    def slots(self, batch):
        """Return the table indices of the next observations of transitions ``[T, B]``."""
        hashed = (self.flatten(batch["obs"]).to(self.factors) * self.factors).sum(-1).round().long()
        return hashed[1:] % len(self.visits)

    def observe(self, segment, learner):
        """Count visits on all ranks."""
        found = learner.gather(self.slots(segment.batch)[segment.batch["valid"][:-1]])
        self.visits.index_add_(0, found, torch.ones_like(found))

    def intrinsic_reward(self, batch):
        bonus = self.beta * self.visits[self.slots(batch)].clamp(min=1).float().rsqrt()
        bonus = torch.where(batch["valid"][:-1], bonus, 0.0)
        return torch.cat((bonus, torch.zeros_like(bonus[:1])))

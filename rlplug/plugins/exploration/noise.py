"""Noise added to continuous actions while exploring."""

from __future__ import annotations

import torch
from gymnasium import spaces

from rlplug.api import Context, Exploration
from rlplug.settings import PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError


def _action_size(ctx: Context, name: str) -> tuple[int, ...]:
    action = ctx.spec.single_agent.action
    if not isinstance(action, spaces.Box):
        raise ConfigError(f"exploration.{name}", f"adds noise to continuous actions, but the actions are {action}")
    return action.shape


class Gaussian(Exploration):
    """Independent noise, ``a + std * N(0, 1)``, in units of actions in [-1, 1]."""

    @settings
    class Config:
        std: Scheduled[PositiveFloat] = option("Standard deviation; actions lie in [-1, 1].")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.shape = ctx, _action_size(ctx, "gaussian")
        self.std = ctx.schedule(cfg.std)

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action = out["action"]
        noise = self.ctx.randn(len(action), *self.shape)
        return out | {"action": (action + self.std * noise).clamp(-1.0, 1.0)}, carry


class OrnsteinUhlenbeck(Exploration):
    """Noise with a memory, for environments where independent noise cancels out.

    ``x <- x + theta * (0 - x) + sigma * N(0, 1)``, started anew with every episode
    (Uhlenbeck & Ornstein 1930; Lillicrap et al. 2016, arXiv:1509.02971, section 7).
    """

    @settings
    class Config:
        sigma: Scheduled[PositiveFloat] = option("Size of the random step; actions lie in [-1, 1].")
        theta: UnitFloat = option("Pull back to zero per step.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.shape = ctx, _action_size(ctx, "ornstein_uhlenbeck")
        self.theta, self.sigma = cfg.theta, ctx.schedule(cfg.sigma)

    def initial_carry(self, n: int) -> Batch:
        return {"x": torch.zeros(n, *self.shape, device=self.ctx.device)}

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action = out["action"]
        fresh = step["is_first"].view(-1, *(1 for _ in self.shape))
        x = torch.where(fresh, 0.0, carry["x"])
        x = (1.0 - self.theta) * x + self.sigma * self.ctx.randn(len(action), *self.shape)
        return out | {"action": (action + x).clamp(-1.0, 1.0)}, {"x": x}

"""Exploration noise for continuous actions."""

from __future__ import annotations

from typing import Annotated

import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor

from rlplug.api import Context, Exploration
from rlplug.settings import PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError

Ratio = Annotated[float, Field(gt=0.0, le=1.0)]


def _by_env(first: Tensor, ratio: float | None, ctx: Context) -> Tensor | None:
    """Return noise scales that decrease geometrically over the run's environments, as in Ape-X: ``[num_envs]``."""
    return None if ratio is None else first * ratio ** torch.linspace(0.0, 1.0, ctx.num_envs, device=ctx.device)


def _scaled(first: Tensor, every: Tensor | None, ctx: Context, noise: Tensor) -> Tensor:
    """Return ``noise [B, ...]`` times the scale of each row's environment, or the common one."""
    return first * noise if every is None else every[[*ctx.env_ids]].view(-1, *(1,) * (noise.ndim - 1)) * noise


def _action_size(ctx: Context, name: str) -> tuple[int, ...]:
    action = ctx.spec.single_agent.action
    if not isinstance(action, spaces.Box):
        raise ConfigError(f"exploration.{name}", f"adds noise to continuous actions, but the actions are {action}")
    return action.shape


class Gaussian(Exploration):
    """Adds independent noise, ``a + std * N(0, 1)``, in units of actions in [-1, 1]."""

    traceable = True

    @settings
    class Config:
        std: Scheduled[PositiveFloat] = option("Standard deviation; actions lie in [-1, 1].")
        ape_x_ratio: Ratio | None = option(
            "Noise of the last environment, as a fraction of the first; null: equal in all."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.shape = ctx, _action_size(ctx, "gaussian")
        self.std, self.ratio = ctx.schedule(cfg.std), cfg.ape_x_ratio

    def noise_by_env(self) -> Tensor | None:
        return _by_env(self.std, self.ratio, self.ctx)

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action = out["action"]
        noise = _scaled(self.std, self.noise_by_env(), self.ctx, self.ctx.randn(len(action), *self.shape))
        return out | {"action": (action + noise).clamp(-1.0, 1.0)}, carry


class OrnsteinUhlenbeck(Exploration):
    """Adds temporally correlated noise, for environments where independent noise averages out.

    ``x <- x + theta * (0 - x) + sigma * N(0, 1)``, reset to 0 at every episode
    (Uhlenbeck & Ornstein 1930; Lillicrap et al. 2016, arXiv:1509.02971, section 7).
    """

    traceable = True

    @settings
    class Config:
        sigma: Scheduled[PositiveFloat] = option("Size of the random step; actions lie in [-1, 1].")
        ape_x_ratio: Ratio | None = option(
            "Noise of the last environment, as a fraction of the first; null: equal in all."
        )
        theta: UnitFloat = option("Mean reversion per step.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.shape = ctx, _action_size(ctx, "ornstein_uhlenbeck")
        self.theta, self.sigma, self.ratio = cfg.theta, ctx.schedule(cfg.sigma), cfg.ape_x_ratio

    def noise_by_env(self) -> Tensor | None:
        return _by_env(self.sigma, self.ratio, self.ctx)

    def initial_carry(self, n: int) -> Batch:
        return {"x": torch.zeros(n, *self.shape, device=self.ctx.device)}

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action = out["action"]
        fresh = step["is_first"].view(-1, *(1 for _ in self.shape))
        x = torch.where(fresh, 0.0, carry["x"])
        noise = _scaled(self.sigma, self.noise_by_env(), self.ctx, self.ctx.randn(len(action), *self.shape))
        x = (1.0 - self.theta) * x + noise
        return out | {"action": (action + x).clamp(-1.0, 1.0)}, {"x": x}

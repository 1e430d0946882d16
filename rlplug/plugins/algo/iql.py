"""Implicit Q-learning, Kostrikov et al. 2021 (arXiv:2110.06169), an offline algorithm.

It evaluates no action outside the dataset: a value function is an upper expectile of the dataset actions' values, the
critics bootstrap from it, and the policy imitates actions weighted by their advantage over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.offline import expectile_loss
from rlplug.functional.sequences import longest, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.nn import Adam, Distribution, Linear, Policy, choices_of, critic_for, precise
from rlplug.settings import (
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    Scheduled,
    StepRange,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class Value(nn.Module):
    """Maps observations to values ``[...]``: a torso, and a linear layer."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.torso: Model = ctx.build("critic_model", ctx.spec.single_agent.obs)
        self.out = Linear(self.torso.out_dim, 1)

    def forward(self, obs: Any) -> Tensor:
        return precise(self.out, self.torso(obs, {}, None)[0]).squeeze(-1)


class IQL(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        tau: UnitFloat = option("Polyak step of the target critics.")
        expectile: UnitFloat = option("Expectile of the dataset actions' values; 0.5: mean, near 1: maximum.")
        beta: NonNegativeFloat = option("Inverse temperature of the advantages; 0: behavioral cloning.")
        max_weight: PositiveFloat = option("Maximum weight of a dataset action.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        value_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the value function.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        gaussian = choices_of(spec.single_agent.action) is None  # samples may be out of bounds; noise is clipped
        if not 0.0 < cfg.expectile < 1.0:
            raise ConfigError("algo.expectile", f"{cfg.expectile} should be greater than 0 and less than 1")
        window, keys = Window(longest(cfg.n_step)), ("obs", "action", "reward", "terminated", "valid", "action_mask")
        return Needs(window, data="windows", off_policy=True, perturbable=not gaussian, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.clips = isinstance(group.action, spaces.Box) and group.action.is_bounded()
        self.net, self.value = Policy(ctx.build("model", group.obs), group.action, cfg), Value(ctx)
        build = partial(critic_for, partial(ctx.build, "critic_model"), group.obs, group.action)
        self.critic, self.target = (build(ensemble_size=2) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.critic.state_dict())
        lrs = {"actor": cfg.actor_lr, "critic": cfg.critic_lr, "value": cfg.value_lr}
        self.lr = {part: ctx.schedule(lr) for part, lr in lrs.items()}

    def optimizers(self) -> dict[str, Optim]:
        def part(module: nn.Module, lr: Tensor) -> Optim:
            return Optim(Adam(module.parameters(), lr=lr), self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)

        modules = {"critic": self.critic, "value": self.value, "actor": self.net}
        return {name: part(module, self.lr[name]) for name, module in modules.items()}

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("net."))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, {})[0]

    def values(self, batch: Batch) -> Tensor:
        return self.value(batch["obs"])

    def prepare(self, batch: Batch) -> Batch:
        """Sum ``n_step`` rewards from every sampled row."""
        out = n_step_transitions(batch, self.cfg.gamma, self.cfg.n_step, self.ctx.randint)
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute all three losses in one graph; every parameter gets the gradient of its own loss only."""
        cfg, losses, action = self.cfg, Losses({}), batch["action"]
        factors = action.flatten(1) if action.ndim > 1 else action.unsqueeze(-1)
        if self.clips:  # as executed: Gaussian actions may be out of bounds
            factors = factors.clamp(-1.0, 1.0)
        if "critic" in parts:  # equation 6
            code, _ = self.critic.encode(batch["obs"], {}, None)
            with torch.no_grad():
                target = batch["returns"] + batch["discount"] * self.value(batch["next_obs"])
            q = self.critic(code, factors)
            error = q - target
            loss = 0.5 * error.square().sum(0)
            losses.terms["critic"] = loss * batch["weight"] if "weight" in batch else loss
            losses.metrics["q"] = q[0].detach()
            losses.feedback["priority"] = error.detach().abs().mean(0)
        if "value" in parts or "actor" in parts:
            with torch.no_grad():
                code, _ = self.target.encode(batch["obs"], {}, None)
                q = self.target(code, factors).amin(0)
            value = self.value(batch["obs"])
            advantage = q - value
            if "value" in parts:  # equation 5
                losses.terms["value"] = expectile_loss(advantage, cfg.expectile)
            if "actor" in parts:  # equation 7
                weight = (cfg.beta * advantage.detach()).exp().clamp(max=cfg.max_weight)
                dist, _ = self.net.dist(batch, {})
                losses.terms["actor"] = -weight * dist.logp(action)
                losses.metrics |= {"advantage": advantage.detach(), "weight": weight}
        return losses

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "critic" in parts:
            polyak_(self.target, self.critic, self.cfg.tau)

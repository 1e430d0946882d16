"""Advantage actor-critic, Mnih et al. 2016 (arXiv:1602.01783), synchronously: A2C.

Every rollout gives one gradient step, with the weights that acted. So one pass over the rows, in ``forward``,
computes values, advantages and gradients, and a recurrent model is unrolled from the state before row 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Losses, Needs, Optim, Window
from rlplug.functional.returns import gae
from rlplug.functional.sequences import carry_before
from rlplug.nn import ActorCritic, Distribution, Policy, adam_or_rmsprop
from rlplug.nn.actor_critic import require_critic
from rlplug.settings import NonNegativeFloat, PolicyOptions, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, EnvSpec, Mode


class A2C(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda; 1: n-step returns up to the end of the rollout.")
        lr: Scheduled[NonNegativeFloat] = option("Step size.")
        critic_lr: Scheduled[NonNegativeFloat] | None = option("Step size of the value; null: one optimizer for both.")
        opt_type: Literal["adam", "rmsprop"] = option("Optimizer.")
        epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
        decay: UnitFloat = option("RMSProp: decay of the mean of squared gradients.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        use_critic: bool = option("Learn a value; false: advantages are discounted returns, with lambda_=1.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        require_critic(cfg.use_critic, cfg.lambda_, cfg.critic_lr)
        return Needs(data="rollout", keys=("obs", "action", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=1), keys=(*needs.keys, "is_first", "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        if cfg.use_critic:
            self.net: Policy = ActorCritic.of_run(ctx, cfg.vf_share_layers, cfg)
        else:
            self.net = Policy(ctx.build("model", ctx.spec.single_agent.obs), ctx.spec.single_agent.action, cfg)
        self.lr = ctx.schedule(cfg.lr)
        self.critic_lr = None if cfg.critic_lr is None else ctx.schedule(cfg.critic_lr)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)

    def optimizers(self) -> dict[str, Optim]:
        cfg, found = self.cfg, dict[str, Optim]()
        for name, (own, lr) in self.net.parts(self.lr, self.critic_lr).items():
            optimizer = adam_or_rmsprop(cfg.opt_type, own, lr, cfg.epsilon, cfg.decay)
            found[name] = Optim(optimizer, cfg.grad_clip, cfg.grad_clip_by, lr=lr)
        return found

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, carry_before(batch))[0]

    def values(self, batch: Batch) -> Tensor:
        return self.net.values(batch, carry_before(batch))

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of algorithm S3: the policy's, with its entropy bonus, and the value's."""
        cfg = self.cfg
        if cfg.use_critic:
            dist, value = self.net(batch, carry_before(batch))
        else:
            dist, value = self.distribution(batch), torch.zeros_like(batch["reward"])
        with torch.no_grad():
            rows = batch["reward"], value, batch["terminated"], batch["valid"]
            advantage, returns = gae(*rows, cfg.gamma, cfg.lambda_)
        terms = {"policy": -dist.logp(batch["action"]) * advantage}
        if cfg.use_critic:
            terms["value"] = self.vf_loss_coeff * (value - returns).square()
        entropy = dist.entropy()
        if cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * entropy
        return Losses(terms, {"mean_entropy": entropy.detach(), "advantage": advantage})


class A3C(A2C):
    """A2C's losses; every actor computes gradients on its own segments, and they are applied asynchronously."""

    @classmethod
    def needs(cls, cfg: A2C.Config, spec: EnvSpec) -> Needs:
        return replace(super().needs(cfg, spec), data="segments", gradients=True)

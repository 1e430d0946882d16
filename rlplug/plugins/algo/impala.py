"""IMPALA, Espeholt et al. 2018 (arXiv:1802.01561): an actor-critic trained on segments from older policies.

V-trace weights every temporal difference by the ratio of the current to the behavior policy. The loop decides who
collects and how old a segment may be; the buffer decides which segments are used, and how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.sequences import carry_before
from rlplug.functional.vtrace import vtrace
from rlplug.nn import ActorCritic, Distribution, adam_or_rmsprop
from rlplug.settings import (
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class IMPALA(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("Weight of longer returns in V-trace; 1: as in the paper.")
        vtrace: bool = option("V-trace off-policy correction; false: none.")
        vtrace_clip_rho_threshold: PositiveFloat | None = option(
            "Clip of the ratio that weights a temporal difference, rho-bar; null: none."
        )
        vtrace_clip_c_threshold: PositiveFloat | None = option("Clip of the trace-cutting ratios, c-bar; null: none.")
        vtrace_clip_pg_rho_threshold: PositiveFloat | None = option(
            "Clip of the ratio in the policy gradient; null: none."
        )
        lr: Scheduled[NonNegativeFloat] = option("Step size.")
        critic_lr: Scheduled[NonNegativeFloat] | None = option("Step size of the value; null: one optimizer for both.")
        opt_type: Literal["adam", "rmsprop"] = option("Optimizer.")
        epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
        decay: UnitFloat = option("RMSProp: decay of the mean of squared gradients.")
        momentum: UnitFloat = option("RMSProp: momentum.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        return Needs(data="segments", off_policy=True, keys=("obs", "action", "logp", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=1), keys=(*needs.keys, "is_first", "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.net = ActorCritic.of_run(ctx, cfg.vf_share_layers, cfg)
        self.lr = ctx.schedule(cfg.lr)
        self.critic_lr = None if cfg.critic_lr is None else ctx.schedule(cfg.critic_lr)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)

    def optimizers(self) -> dict[str, Optim]:
        cfg, found = self.cfg, dict[str, Optim]()
        for name, (own, lr) in self.net.parts(self.lr, self.critic_lr).items():
            optimizer = adam_or_rmsprop(cfg.opt_type, own, lr, cfg.epsilon, cfg.decay, cfg.momentum)
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

    def prepare(self, batch: Batch) -> Batch:
        """Return the rows unchanged; ``forward`` makes the only pass over them.

        Raises:
            ConfigError: the rows lack the log-probabilities of the behavior policy.
        """
        if "logp" not in batch:
            said = "gives rows without logp, the log-probabilities of the policy that acted, which V-trace divides by"
            raise ConfigError("buffer", f"{said}; collect them with algo=impala")
        return dict(batch)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        age = (learner.progress.updates - batch.pop("version")).float() if "version" in batch else None
        losses = learner.minimize(batch, self)
        if age is not None:
            losses.metrics["age"] = learner.reduce(age, "mean")
        return losses

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the three terms of section 4.2, with V-trace targets of the current policy and value."""
        cfg = self.cfg
        dist, value = self.net(batch, carry_before(batch))
        logp = dist.logp(batch["action"])
        with torch.no_grad():
            log_rho = logp - batch["logp"]
            corrected = log_rho if cfg.vtrace else torch.zeros_like(log_rho)
            rows = corrected, batch["reward"], value, batch["terminated"], batch["valid"]
            limits = cfg.vtrace_clip_rho_threshold, cfg.vtrace_clip_c_threshold, cfg.vtrace_clip_pg_rho_threshold
            target, advantage = vtrace(*rows, cfg.gamma, cfg.lambda_, *limits)
            entropy = dist.entropy()
        terms = {"policy": -logp * advantage, "value": self.vf_loss_coeff * (value - target).square()}
        if cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * dist.entropy()
        return Losses(terms, {"mean_entropy": entropy, "ratio": log_rho.exp()})

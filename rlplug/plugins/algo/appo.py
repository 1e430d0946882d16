"""Asynchronous PPO: IMPACT, Luo et al. 2020 (arXiv:1912.00167), PPO's objective on data from older policies.

There are three policies: the learned one, the behavior policy that acted, and a target network, a copy that is updated
periodically. The clipped ratio is that of the learned policy to the target, which does not change between updates
while a batch is used several times.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate
from rlplug.functional.returns import gae
from rlplug.functional.sequences import carry_before, chunks
from rlplug.functional.targets import polyak_
from rlplug.functional.vtrace import vtrace
from rlplug.nn import ActorCritic, Distribution, adam_or_rmsprop
from rlplug.settings import (
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class APPO(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("Weight of longer returns, in V-trace and in GAE.")
        vtrace: bool = option("V-trace advantages for the target policy; false: GAE without off-policy correction.")
        vtrace_clip_rho_threshold: PositiveFloat | None = option(
            "Clip of the ratio that weights a temporal difference, rho-bar; null: none."
        )
        vtrace_clip_c_threshold: PositiveFloat | None = option("Clip of the trace-cutting ratios, c-bar; null: none.")
        vtrace_clip_pg_rho_threshold: PositiveFloat | None = option("Clip of the ratio in advantages; null: none.")
        clip_param: Scheduled[NonNegativeFloat] = option("Epsilon of the clipped surrogate.")
        target_worker_clipping: PositiveFloat = option("Clip of the ratio of the behavior policy to the target, rho.")
        target_update_period: PositiveInt = option("Updates between two updates of the target.")
        tau: UnitFloat = option("Polyak step of the target network; 1: copy.")
        kl_coeff: NonNegativeFloat = option("Initial weight of the KL penalty; adapts to kl_target; 0: off.")
        kl_target: PositiveFloat = option("Target KL divergence from the target policy.")
        lr: Scheduled[NonNegativeFloat] = option("Step size.")
        critic_lr: Scheduled[NonNegativeFloat] | None = option("Step size of the value; null: one optimizer for both.")
        opt_type: Literal["adam", "rmsprop"] = option("Optimizer.")
        epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
        decay: UnitFloat = option("RMSProp: decay of the mean of squared gradients.")
        momentum: UnitFloat = option("RMSProp: momentum.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        normalize_advantage: bool = option("Per sample, over all ranks.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        max_seq_len: PositiveInt = option("Recurrent: rows unrolled at once from the stored state.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        return Needs(data="segments", off_policy=True, keys=("obs", "action", "logp", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=cfg.max_seq_len), keys=(*needs.keys, "is_first", "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.net = ActorCritic.of_run(ctx, cfg.vf_share_layers, cfg)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.lr, self.clip_param = ctx.schedule(cfg.lr), ctx.schedule(cfg.clip_param)
        self.critic_lr = None if cfg.critic_lr is None else ctx.schedule(cfg.critic_lr)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)
        self.kl_coeff: Tensor
        self.register_buffer("kl_coeff", torch.tensor(cfg.kl_coeff))

    def optimizers(self) -> dict[str, Optim]:
        cfg, found = self.cfg, dict[str, Optim]()
        for name, (own, lr) in self.net.parts(self.lr, self.critic_lr).items():
            optimizer = adam_or_rmsprop(cfg.opt_type, own, lr, cfg.epsilon, cfg.decay, cfg.momentum)
            found[name] = Optim(optimizer, cfg.grad_clip, cfg.grad_clip_by, lr=lr)
        return found

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("net."))

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, carry_before(batch))[0]

    def values(self, batch: Batch) -> Tensor:
        return self.net.values(batch, carry_before(batch))

    def prepare(self, batch: Batch) -> Batch:
        """Compute the target's distribution, advantages and value targets, none of which needs the learned policy.

        Raises:
            ConfigError: rows lack the log-probabilities of the behavior policy.
        """
        if "logp" not in batch:
            said = "gives rows without logp, the log-probabilities of the policy that acted, which ratios divide by"
            raise ConfigError("buffer", f"{said}; collect them with algo=appo")
        cfg = self.cfg
        target, _ = self.target.dist(batch, carry_before(batch))
        target_logp = target.logp(batch["action"])
        rows = batch["reward"], self.values(batch), batch["terminated"], batch["valid"]
        if cfg.vtrace:
            limits = cfg.vtrace_clip_rho_threshold, cfg.vtrace_clip_c_threshold, cfg.vtrace_clip_pg_rho_threshold
            returns, advantage = vtrace(target_logp - batch["logp"], *rows, cfg.gamma, cfg.lambda_, *limits)
        else:
            advantage, returns = gae(*rows, cfg.gamma, cfg.lambda_)
        keys = ("obs", "action", "logp", "valid", "action_mask", "version", "is_first", "carry")
        prepared = {key: batch[key] for key in keys if key in batch}
        prepared |= {"target_logp": target_logp, "dist": target.params, "advantage": advantage, "returns": returns}
        return prepared

    def update(self, batch: Batch, learner: Learner) -> Losses:
        age = (learner.progress.updates - batch.pop("version")).float() if "version" in batch else None
        if self.cfg.normalize_advantage:
            a, valid = batch["advantage"], batch["valid"]
            scale = learner.reduce(a, "std", valid) + 1e-8
            batch["advantage"] = (a - learner.reduce(a, "mean", valid)) / scale
        losses = learner.minimize(chunks(batch, self.cfg.max_seq_len) if "carry" in batch else batch, self)
        if age is not None:
            losses.metrics["age"] = learner.reduce(age, "mean")
        return losses

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the objective of section 3.1, with the value loss, the entropy bonus and the KL penalty."""
        cfg = self.cfg
        dist, value = self.net(batch, carry_before(batch))
        of_worker = (batch["logp"] - batch["target_logp"]).exp().clamp(max=cfg.target_worker_clipping)
        ratio = of_worker * (dist.logp(batch["action"]) - batch["logp"]).exp()
        terms = {
            "policy": -clipped_surrogate(ratio, batch["advantage"], self.clip_param),
            "value": self.vf_loss_coeff * (value - batch["returns"]).square(),
        }
        if cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * dist.entropy()
        if cfg.kl_coeff:
            terms["kl_penalty"] = self.kl_coeff * dist.kl_from(batch["dist"])
        with torch.no_grad():
            clipped = ((ratio - 1.0).abs() > self.clip_param).float()
            metrics = {"kl": dist.kl_from(batch["dist"]), "mean_entropy": dist.entropy(), "clip_fraction": clipped}
        return Losses(terms, metrics)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        """Update the target and adapt the KL penalty's weight every ``target_update_period`` updates."""
        if (learner.progress.updates + 1) % self.cfg.target_update_period:
            return
        polyak_(self.target, self.net, self.cfg.tau)
        if self.cfg.kl_coeff:
            self.kl_coeff.copy_(adapt_kl_coeff(self.kl_coeff, losses.metrics["kl"], self.cfg.kl_target))

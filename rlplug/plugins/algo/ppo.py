"""Proximal Policy Optimization, Schulman et al. 2017 (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate, clipped_value_loss
from rlplug.functional.returns import gae
from rlplug.functional.sequences import carry_before, chunks
from rlplug.nn import ActorCritic, Adam, Distribution, Policy
from rlplug.nn.actor_critic import require_critic
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


class PPO(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        critic_lr: Scheduled[NonNegativeFloat] | None = option("Step size of the value; null: one optimizer for both.")
        sgd_minibatch_size: PositiveInt = option("Rows per gradient step, over all ranks.")
        num_sgd_iter: PositiveInt = option("Epochs over each rollout.")
        clip_param: Scheduled[NonNegativeFloat] = option("Epsilon of the clipped surrogate.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_clip_param: PositiveFloat | None = option("Clip of the change of the value prediction; null: unclipped.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        use_critic: bool = option("Learn a value; false: advantages are discounted returns, with lambda_=1.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        kl_coeff: NonNegativeFloat = option("Initial weight of the KL penalty; adapts to kl_target; 0: off.")
        kl_target: PositiveFloat = option("Target KL divergence.")
        kl_stop: PositiveFloat | None = option(
            "Early stopping: end the epochs when a minibatch's KL exceeds this; null: never."
        )
        normalize_advantage: bool = option("Per minibatch, over all ranks.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        max_seq_len: PositiveInt = option("Recurrent: rows unrolled at once from the stored state.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        require_critic(cfg.use_critic, cfg.lambda_, cfg.critic_lr)
        return Needs(data="rollout", keys=("obs", "action", "logp", "dist", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=cfg.max_seq_len), keys=(*needs.keys, "is_first", "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        rows = ctx.rollout_length * ctx.num_envs
        if cfg.sgd_minibatch_size > rows:
            raise ConfigError(
                "algo.sgd_minibatch_size", f"{cfg.sgd_minibatch_size} is more than a rollout's {rows} rows"
            )
        self.sequences = ctx.needs.window.stride > 0
        length = min(cfg.max_seq_len, ctx.rollout_length)
        if self.sequences and cfg.sgd_minibatch_size < length:
            raise ConfigError(
                "algo.sgd_minibatch_size",
                f"{cfg.sgd_minibatch_size} rows are less than the {length} that a recurrent model learns from at once "
                "(algo.max_seq_len)",
            )
        obs, action = ctx.spec.single_agent.obs, ctx.spec.single_agent.action
        torso = ctx.build("model", obs)
        if cfg.use_critic:
            value_torso = None if cfg.vf_share_layers else ctx.build("critic_model", obs)
            self.net: Policy = ActorCritic(torso, value_torso, action, cfg)
        else:
            self.net = Policy(torso, action, cfg)
        if self.sequences and not self.initial_carry(1):
            raise ConfigError("critic_model", "has a recurrent state, but algo.vf_share_layers leaves it out")
        self.lr, self.clip_param = ctx.schedule(cfg.lr), ctx.schedule(cfg.clip_param)
        self.critic_lr = None if cfg.critic_lr is None else ctx.schedule(cfg.critic_lr)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)
        self.kl_coeff: Tensor
        self.register_buffer("kl_coeff", torch.tensor(cfg.kl_coeff))

    def optimizers(self) -> dict[str, Optim]:
        parts = self.net.parts(self.lr, self.critic_lr).items()
        clip, by = self.cfg.grad_clip, self.cfg.grad_clip_by
        return {name: Optim(Adam(own, lr=lr, eps=1e-5), clip, by, lr=lr) for name, (own, lr) in parts}

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, carry_before(batch))[0]

    def values(self, batch: Batch) -> Tensor:
        return self.net.values(batch, carry_before(batch))

    def prepare(self, batch: Batch) -> Batch:
        """Compute advantages by GAE, equations 11 and 12, and the value targets.

        The weights are still those that acted, so one forward pass, or one unroll, gives all values of the rollout.
        """
        value = self.values(batch) if self.cfg.use_critic else torch.zeros_like(batch["reward"])
        advantage, ret = gae(
            batch["reward"], value, batch["terminated"], batch["valid"], self.cfg.gamma, self.cfg.lambda_
        )
        keys = (
            "obs",
            "action",
            "logp",
            "dist",
            "valid",
            "action_mask",
            *(("is_first", "carry") if self.sequences else ()),
        )
        prepared = {key: batch[key] for key in keys if key in batch}
        prepared |= {"value": value, "advantage": advantage, "returns": ret}
        return chunks(prepared, self.cfg.max_seq_len) if self.sequences else prepared

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute equation 9, with the adaptive penalty of equation 8 if ``kl_coeff`` is on."""
        dist, value = self.net(batch, carry_before(batch)) if self.cfg.use_critic else (self.distribution(batch), None)
        logp = dist.logp(batch["action"])
        ratio = torch.exp(logp - batch["logp"])
        terms = {"policy": -clipped_surrogate(ratio, batch["advantage"], self.clip_param)}
        if value is not None:
            error = clipped_value_loss(value, batch["value"], batch["returns"], self.cfg.vf_clip_param)
            terms["value"] = self.vf_loss_coeff * error
        if self.cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * dist.entropy()
        if self.cfg.kl_coeff:
            terms["kl_penalty"] = self.kl_coeff * dist.kl_from(batch["dist"])

        def diagnostics() -> dict[str, Tensor]:
            clipped = (ratio - 1.0).abs() > self.clip_param
            kl, entropy = dist.kl_from(batch["dist"]), dist.entropy()
            return {"kl": kl, "mean_entropy": entropy, "clip_fraction": clipped.float()}

        return Losses(terms, diagnostics=diagnostics)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses, cfg = Losses({}), self.cfg
        size = cfg.sgd_minibatch_size
        if self.sequences:
            size = max(1, round(size / len(batch["valid"])))
        for epoch in range(cfg.num_sgd_iter):
            read = cfg.kl_stop is not None or epoch == cfg.num_sgd_iter - 1  # the last step's metrics are logged
            for minibatch in learner.minibatches(batch, size, "column" if self.sequences else "row"):
                if cfg.normalize_advantage:
                    a, valid = minibatch["advantage"], minibatch.get("valid")
                    scale = learner.reduce(a, "std", valid) + 1e-8
                    minibatch["advantage"] = (a - learner.reduce(a, "mean", valid)) / scale
                losses = learner.minimize(minibatch, self, diagnostics=read)
                if cfg.kl_stop is not None and losses.metrics["kl"] > cfg.kl_stop:
                    return self._adapt(losses)
        return self._adapt(losses)

    def _adapt(self, losses: Losses) -> Losses:
        if self.cfg.kl_coeff and losses.metrics:
            self.kl_coeff.copy_(adapt_kl_coeff(self.kl_coeff, losses.metrics["kl"], self.cfg.kl_target))
            losses.metrics["kl_coeff"] = self.kl_coeff.clone()
        return losses

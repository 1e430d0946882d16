"""Proximal Policy Optimization, Schulman et al. 2017 (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate, clipped_value_loss
from rlplug.functional.returns import gae
from rlplug.nn import Adam, Linear, head_for
from rlplug.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class PPO(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        sgd_minibatch_size: PositiveInt = option("Rows per gradient step, over all ranks.")
        num_sgd_iter: PositiveInt = option("Epochs over each rollout.")
        clip_param: Scheduled[NonNegativeFloat] = option("Epsilon of the clipped surrogate.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_clip_param: PositiveFloat | None = option(
            "The value prediction may move this far from the old one; null: unclipped."
        )
        vf_share_layers: bool = option("One torso for policy and value.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        kl_coeff: NonNegativeFloat = option("Initial weight of the KL penalty, which adapts to kl_target; 0: off.")
        kl_target: PositiveFloat = option("KL divergence that kl_coeff aims at.")
        kl_stop: PositiveFloat | None = option("End the epochs when a minibatch's KL exceeds this; null: never.")
        normalize_advantage: bool = option("Per minibatch, over all ranks.")
        grad_clip: PositiveFloat | None = option("Limit of the gradient; null: off.")
        grad_clip_by: Clip = option("value, norm (every tensor by itself) or global_norm.")
        initial_log_std: float = option("Log standard deviation of Gaussian actions at the start.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.sole  # noqa: B018  raises for several agents
        return Needs(keys=("obs", "action", "logp", "dist"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        rows = ctx.rows * ctx.num_envs
        if cfg.sgd_minibatch_size > rows:
            raise ConfigError(
                "algo.sgd_minibatch_size", f"{cfg.sgd_minibatch_size} is more than a rollout's {rows} rows"
            )
        obs, action = ctx.spec.sole.obs, ctx.spec.sole.action
        self.model = ctx.build("model", obs)
        self.value_model = None if cfg.vf_share_layers else ctx.build("critic_model", obs)
        self.policy = head_for(action, self.model.out_dim, initial_log_std=cfg.initial_log_std)
        self.value = Linear((self.value_model or self.model).out_dim, 1, gain=1.0)
        self.lr, self.clip_param = ctx.schedule(cfg.lr), ctx.schedule(cfg.clip_param)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)
        self.kl_coeff: Tensor
        self.register_buffer("kl_coeff", torch.tensor(cfg.kl_coeff))

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.parameters(), lr=self.lr, eps=1e-5)
        return {"policy": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def dist(self, obs):
        """Features of the policy's torso, and the action distribution of every row."""
        features, _ = self.model(obs, {}, None)
        return features, self.policy(features)

    def values(self, obs, features: Tensor | None = None) -> Tensor:
        """Value ``[...]`` of every row; ``features`` are those of the policy's torso, if they are known."""
        model = self.value_model or self.model
        if model is not self.model or features is None:
            features, _ = model(obs, {}, None)
        return self.value(features).squeeze(-1)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        _, dist = self.dist(step["obs"])
        if mode == "greedy":
            return {"action": dist.mode()}, carry
        action = dist.sample(self.policy.noise(self.ctx, len(step["is_first"])))
        return {"action": action, "logp": dist.logp(action), "dist": dist.params}, carry

    def prepare(self, batch: Batch) -> Batch:
        """Equations 11 and 12: advantages by GAE, and the value's targets.

        The weights are still those that acted, so all values of the rollout come from one forward.
        """
        value = self.values(batch["obs"])
        advantage, ret = gae(
            batch["reward"], value, batch["terminated"], batch["valid"], self.cfg.gamma, self.cfg.lambda_
        )
        keys = ("obs", "action", "logp", "dist", "valid")
        return {key: batch[key] for key in keys} | {"value": value, "advantage": advantage, "ret": ret}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Equation 9, with the adaptive penalty of equation 8 where ``kl_coeff`` is on."""
        features, dist = self.dist(batch["obs"])
        value = self.values(batch["obs"], features)
        logp = dist.logp(batch["action"])
        ratio = torch.exp(logp - batch["logp"])
        terms = {
            "policy": -clipped_surrogate(ratio, batch["advantage"], self.clip_param),
            "value": self.vf_loss_coeff
            * clipped_value_loss(value, batch["value"], batch["ret"], self.cfg.vf_clip_param),
        }
        if self.cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * dist.entropy()
        if self.cfg.kl_coeff:
            terms["kl_penalty"] = self.kl_coeff * dist.kl_from(batch["dist"])
        with torch.no_grad():
            clipped = (ratio - 1.0).abs() > self.clip_param
            metrics = {
                "kl": dist.kl_from(batch["dist"]),
                "mean_entropy": dist.entropy(),
                "clip_fraction": clipped.float(),
            }
        return Losses(terms, metrics)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses, cfg = Losses({}), self.cfg
        for _ in range(cfg.num_sgd_iter):
            for minibatch in learner.minibatches(batch, cfg.sgd_minibatch_size, "row"):
                if cfg.normalize_advantage:
                    a = minibatch["advantage"]
                    scale = learner.reduce(a, "std") + 1e-8
                    minibatch["advantage"] = (a - learner.reduce(a, "mean")) / scale
                losses = learner.minimise(minibatch, self)
                if cfg.kl_stop is not None and losses.metrics["kl"] > cfg.kl_stop:
                    return self._adapt(losses)
        return self._adapt(losses)

    def _adapt(self, losses: Losses) -> Losses:
        if self.cfg.kl_coeff and losses.metrics:
            self.kl_coeff.copy_(adapt_kl_coeff(self.kl_coeff, losses.metrics["kl"], self.cfg.kl_target))
            losses.metrics["kl_coeff"] = self.kl_coeff.clone()
        return losses

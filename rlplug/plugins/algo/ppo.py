"""Proximal Policy Optimization, Schulman et al. 2017 (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.policy_gradient import adapt_kl_coeff, clipped_surrogate, clipped_value_loss
from rlplug.functional.returns import gae
from rlplug.nn import Linear, head_for
from rlplug.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, EnvSpec, Mode


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
        return Needs(keys=("obs", "action", "logp", "value", "dist"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
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
        adam = torch.optim.Adam(self.parameters(), lr=self.lr, eps=1e-5, fused=True)
        return {"policy": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def _evaluate(self, obs, is_first: Tensor | None):
        """Action distribution and value ``[...]`` of every row."""
        features, _ = self.model(obs, {}, is_first)
        of_value = features if self.value_model is None else self.value_model(obs, {}, is_first)[0]
        return self.policy(features), self.value(of_value).squeeze(-1)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        if mode == "greedy":
            features, _ = self.model(step["obs"], {}, step["is_first"])
            return {"action": self.policy(features).mode()}, carry
        dist, value = self._evaluate(step["obs"], step["is_first"])
        action = dist.sample(self.policy.noise(self.ctx, len(value)))
        return {"action": action, "logp": dist.logp(action), "value": value, "dist": dist.params}, carry

    def prepare(self, batch: Batch) -> Batch:
        """Equations 11 and 12: advantages by GAE, and the value's targets."""
        advantage, ret = gae(
            batch["reward"], batch["value"], batch["terminated"], batch["valid"], self.cfg.gamma, self.cfg.lambda_
        )
        keys = ("obs", "action", "logp", "value", "dist", "valid")
        return {key: batch[key] for key in keys} | {"advantage": advantage, "ret": ret}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Equation 9, with the adaptive penalty of equation 8 where ``kl_coeff`` is on."""
        dist, value = self._evaluate(batch["obs"], None)
        logp = dist.logp(batch["action"])
        ratio = torch.exp(logp - batch["logp"])
        entropy = dist.entropy()
        terms = {
            "policy": -clipped_surrogate(ratio, batch["advantage"], self.clip_param),
            "value": self.vf_loss_coeff
            * clipped_value_loss(value, batch["value"], batch["ret"], self.cfg.vf_clip_param),
            "entropy": -self.entropy_coeff * entropy,
        }
        kl = dist.kl_from(batch["dist"])
        if self.cfg.kl_coeff:
            terms["kl_penalty"] = self.kl_coeff * kl
        clipped = ((ratio - 1.0).abs() > self.clip_param).float()
        return Losses(terms, {"kl": kl, "mean_entropy": entropy, "clip_fraction": clipped})

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
        if self.cfg.kl_coeff:
            self.kl_coeff.copy_(adapt_kl_coeff(self.kl_coeff, losses.metrics["kl"], self.cfg.kl_target))
            losses.metrics["kl_coeff"] = self.kl_coeff.clone()
        return losses

"""Soft Actor-Critic, Haarnoja et al. 2018 (arXiv:1801.01290; with automatic temperature arXiv:1812.05905)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.returns import n_step
from rlplug.functional.targets import polyak_
from rlplug.nn import Adam, Linear, TanhGaussianHead
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, map_leaves


class Critic(nn.Module):
    """``copies`` independent ``Q(s, a)``; output ``[copies, B]``."""

    def __init__(self, ctx: Context, size: int, copies: int) -> None:
        super().__init__()
        inputs = {"obs": ctx.spec.sole.obs, "action": spaces.Box(-1.0, 1.0, (size,))}
        self.torso = ctx.build("critic_model", spaces.Dict(inputs), copies)
        self.head = Linear(self.torso.out_dim, 1, copies=copies)
        self.copies = copies

    def forward(self, obs, action: Tensor) -> Tensor:
        """``action [B, A]``."""
        features, _ = self.torso({"obs": obs, "action": action}, {}, None)
        return self.head(features).view(self.copies, -1)


class SAC(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: PositiveInt = option("Rewards in the target before it bootstraps.")
        twin_q: bool = option("Two critics, of which the smaller one counts.")
        tau: UnitFloat = option("Polyak step of the target critics.")
        target_network_update_freq: PositiveInt = option("Critic steps between two moves of the target.")
        initial_alpha: PositiveFloat = option("Temperature at the start.")
        target_entropy: Literal["auto"] | float = option("auto: minus the number of action dimensions.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        alpha_lr: Scheduled[NonNegativeFloat] | None = option(
            "Adam's step size of log(alpha); null: alpha stays at initial_alpha."
        )
        grad_clip: PositiveFloat | None = option("Limit of the gradient, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (every tensor by itself) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.sole.action
        if not isinstance(action, spaces.Box):
            raise ConfigError("algo", f"sac needs continuous (Box) actions, but the environment's are {action}")
        if not action.is_bounded():
            raise ConfigError("algo", f"sac needs actions within bounds, but the environment's are {action}")
        return Needs(
            window=cfg.n_step, stale=True, perturbed=True, keys=("obs", "action", "reward", "terminated", "valid")
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        action = cast(spaces.Box, ctx.spec.sole.action)
        self.shape, self.size = action.shape, math.prod(action.shape)
        self.model = ctx.build("model", ctx.spec.sole.obs)
        self.policy = TanhGaussianHead(self.model.out_dim, self.size)
        self.critic = Critic(ctx, self.size, 2 if cfg.twin_q else 1)
        self.target = Critic(ctx, self.size, 2 if cfg.twin_q else 1).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.initial_alpha)), requires_grad=cfg.alpha_lr is not None)
        self.target_entropy = -float(self.size) if cfg.target_entropy == "auto" else cfg.target_entropy
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.alpha_lr = ctx.schedule(0.0 if cfg.alpha_lr is None else cfg.alpha_lr)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        def part(params, lr: Tensor) -> Optim:
            return Optim(Adam(params, lr=lr), self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)

        parts = {
            "critic": part(self.critic.parameters(), self.critic_lr),
            "actor": part([*self.model.parameters(), *self.policy.parameters()], self.actor_lr),
        }
        return parts | ({"alpha": part([self.log_alpha], self.alpha_lr)} if self.cfg.alpha_lr is not None else {})

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("model.", "policy.")))

    def dist(self, obs):
        features, _ = self.model(obs, {}, None)
        return self.policy(features)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        n = len(step["is_first"])
        if mode == "random":
            return {"action": self.ctx.rand(n, *self.shape) * 2.0 - 1.0}, carry
        dist = self.dist(step["obs"])
        action = dist.mode() if mode == "greedy" else dist.sample(self.ctx.randn(n, self.size))
        return {"action": action.view(n, *self.shape)}, carry

    def prepare(self, batch: Batch) -> Batch:
        """Fold ``n_step`` rewards, and draw the noise of both reparameterised actions."""
        ret, discount, last = n_step(batch["reward"], batch["terminated"], batch["valid"], self.cfg.gamma)
        n = len(ret)
        columns = torch.arange(n, device=ret.device)
        obs = {"obs": batch["obs"]}
        return {
            **map_leaves(lambda x: x[0], obs),
            "action": batch["action"][0].reshape(n, -1),
            "ret": ret,
            "discount": discount,
            "next_obs": map_leaves(lambda x: x[last, columns], obs)["obs"],
            "noise": self.ctx.randn(n, self.size),
            "next_noise": self.ctx.randn(n, self.size),
        }

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """All three losses in one graph; every parameter gets the gradient of its own loss alone."""
        terms: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        alpha = self.log_alpha.exp().detach()
        if "critic" in parts:  # 1812.05905, equations 5 and 6
            with torch.no_grad():
                next_action, next_logp = self.dist(batch["next_obs"]).sample_and_logp(batch["next_noise"])
                next_value = self.target(batch["next_obs"], next_action).amin(0) - alpha * next_logp
                target = batch["ret"] + batch["discount"] * next_value
            q = self.critic(batch["obs"], batch["action"])
            terms["critic"] = 0.5 * (q - target).square().sum(0)
            metrics["q"] = q[0].detach()
        if "actor" in parts or "alpha" in parts:
            action, logp = self.dist(batch["obs"]).sample_and_logp(batch["noise"])
            if "actor" in parts:  # equation 9, through critics that stand still
                still = {name: p.detach() for name, p in self.critic.named_parameters()}
                q_pi = functional_call(self.critic, still, (batch["obs"], action)).amin(0)
                terms["actor"] = alpha * logp - q_pi
            if "alpha" in parts:  # equation 18, on log(alpha)
                terms["alpha"] = -self.log_alpha * (logp.detach() + self.target_entropy)
            metrics["logp"] = logp.detach()
        return Losses(terms, metrics | {"temperature": alpha})

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "critic" in parts:
            self.steps += 1
            if self.cfg.target_network_update_freq == 1 or self.steps % self.cfg.target_network_update_freq == 0:
                polyak_(self.target, self.critic, self.cfg.tau)

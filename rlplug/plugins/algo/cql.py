"""Conservative Q-learning, Kumar et al. 2020 (arXiv:2006.04779): offline SAC (arXiv:1812.05905).

The critics minimize the Bellman error plus ``log integral exp Q(s, a) da - Q(s, a of the data)``, so that they do not
overestimate actions outside the dataset. For ``Discrete`` actions the integral is a sum; DQN has this term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.offline import sampled_log_sum_exp
from rlplug.functional.quadrature import normal_points
from rlplug.functional.sequences import longest, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.nn import Adam, TanhGaussianHead, critic_for, frozen
from rlplug.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    StepRange,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class CQL(Algorithm):
    traceable = True

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        twin_q: bool = option("Two critics; targets and policy use the minimum.")
        tau: UnitFloat = option("Polyak step of the target critics.")
        conservative_weight: NonNegativeFloat = option("Weight of the conservative term; 0: SAC.")
        temperature: PositiveFloat = option("Temperature of its log-sum-exp; near 0: the maximum.")
        num_actions: PositiveInt = option("Actions sampled for it from each of three distributions.")
        lagrangian_thresh: PositiveFloat | None = option(
            "Threshold of the term, whose weight is then learned, starting at conservative_weight; null: fixed weight."
        )
        bc_iters: NonNegativeInt = option("Initial updates in which the policy imitates the dataset's actions.")
        deterministic_backup: bool = option("Targets without the policy's entropy.")
        initial_alpha: PositiveFloat = option("Initial temperature of the policy.")
        target_entropy: Literal["auto"] | float = option("auto: minus the number of action dimensions.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics, and of the learned weight.")
        alpha_lr: Scheduled[NonNegativeFloat] | None = option(
            "Adam's step size of log(alpha); null: alpha stays at initial_alpha."
        )
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.single_agent.action
        if not (isinstance(action, spaces.Box) and action.is_bounded()):
            said = f"needs continuous actions within bounds, but the environment's are {action}"
            raise ConfigError("algo", f"cql {said}; algo=discrete_cql supports Discrete ones, algo=marwil all")
        if cfg.lagrangian_thresh is not None and not cfg.conservative_weight:
            raise ConfigError(
                "algo.conservative_weight", "0 cannot grow; with algo.lagrangian_thresh it should be above 0"
            )
        keys = ("obs", "action", "reward", "terminated", "valid")
        return Needs(Window(longest(cfg.n_step)), data="windows", off_policy=True, perturbable=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        obs, action = ctx.spec.single_agent.obs, ctx.spec.single_agent.action
        assert action.shape is not None
        self.shape, self.size = action.shape, math.prod(action.shape)
        self.model = ctx.build("model", obs)
        self.policy = TanhGaussianHead(self.model.out_dim, self.size)
        build = partial(critic_for, partial(ctx.build, "critic_model"), obs, action)
        self.critic, self.target = (build(ensemble_size=2 if cfg.twin_q else 1) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.critic.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.initial_alpha)), requires_grad=cfg.alpha_lr is not None)
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.alpha_lr = ctx.schedule(0.0 if cfg.alpha_lr is None else cfg.alpha_lr)
        log_weight, learned = math.log(cfg.conservative_weight or 1.0), cfg.lagrangian_thresh is not None
        self.log_weight = nn.Parameter(torch.tensor(log_weight), requires_grad=learned)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        def part(params, lr: Tensor) -> Optim:
            return Optim(Adam(params, lr=lr), self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)

        actor = [*self.model.parameters(), *self.policy.parameters()]
        parts = {"critic": part(self.critic.parameters(), self.critic_lr), "actor": part(actor, self.actor_lr)}
        if self.cfg.alpha_lr is not None:
            parts["alpha"] = part([self.log_alpha], self.alpha_lr)
        if self.cfg.lagrangian_thresh is not None:
            parts["weight"] = part([self.log_weight], self.critic_lr)
        return parts

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("model.", "policy.")))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        dist = self.dist(step["obs"])
        if mode == "random":
            action = self.ctx.rand(len(step["is_first"]), self.size) * 2.0 - 1.0
        elif mode == "greedy":
            action = dist.mode()
        else:
            action = dist.sample(self.policy.noise(self.ctx, len(step["is_first"])))
        out = {"action": action.view(-1, *self.shape)}
        if "logp" in self.ctx.needs.stored and mode != "greedy":
            uniform = action.new_full((len(action),), -self.size * math.log(2.0))
            out["logp"] = uniform if mode == "random" else dist.logp(action)
        return out, carry

    def dist(self, obs: Any) -> Any:
        return self.policy(self.model(obs, {}, None)[0])

    def distribution(self, batch: Batch) -> Any:
        return self.dist(batch["obs"])

    def logp(self, batch: Batch) -> Tensor:
        action = batch["action"]
        return self.distribution(batch).logp(action.reshape(*action.shape[:2], self.size))

    def values(self, batch: Batch) -> Tensor:
        """Return ``E[min Q(s, a)]`` over the policy's actions, by quadrature."""
        dist, (code, _) = self.dist(batch["obs"]), self.critic.encode(batch["obs"], {}, None)
        points = normal_points(32, self.size).to(dist.mean).unbind()  # the same in every call
        return torch.stack([self.critic(code, dist.sample(x)).amin(0) for x in points]).mean(0)

    def prepare(self, batch: Batch) -> Batch:
        """Sum ``n_step`` rewards, and sample actions or their noise."""
        out = n_step_transitions(batch, self.cfg.gamma, self.cfg.n_step, self.ctx.randint)
        n, draw = self.cfg.num_actions, self.ctx.randn
        action = out["action"].flatten(1) if self.shape else out["action"].unsqueeze(-1)
        out["action"] = action.clamp(-1.0, 1.0)  # as executed: Gaussian actions may be out of bounds
        rows = len(out["returns"])
        out |= {name: draw(rows, self.size) for name in ("noise", "next_noise")}
        if self.cfg.conservative_weight:
            out |= {name: draw(rows, n, self.size) for name in ("sample_noise", "next_sample_noise")}
            out["uniform"] = self.ctx.rand(rows, n, self.size) * 2.0 - 1.0
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute all losses in one graph; every parameter gets the gradient of its own loss only."""
        cfg, alpha, weight = self.cfg, self.log_alpha.exp().detach(), self.log_weight.exp().detach()
        losses = Losses({}, {"temperature": alpha})
        dist, (code, _) = self.dist(batch["obs"]), self.critic.encode(batch["obs"], {}, None)
        if "critic" in parts or "weight" in parts:
            next_dist, target = self._target(batch, alpha)
            q = self.critic(code, batch["action"])
            error = q - target
            loss = 0.5 * error.square()
            if cfg.conservative_weight:  # 2006.04779, equation 4
                term = self._soft_maximum(code, dist, next_dist, batch) - q
                loss = loss + weight * term
                losses.metrics |= {"conservative": term.detach().mean(0), "conservative_weight": weight}
                if cfg.lagrangian_thresh is not None and "weight" in parts:  # grows above the threshold
                    above = (term.detach() - cfg.lagrangian_thresh).sum(0)
                    losses.terms["weight"] = -self.log_weight.exp() * above
            if "critic" in parts:
                losses.terms["critic"] = loss.sum(0) * batch["weight"] if "weight" in batch else loss.sum(0)
            losses.metrics["q"] = q[0].detach()
            losses.feedback["priority"] = error.detach().abs().mean(0)
        if "actor" in parts or "alpha" in parts:
            action, logp = dist.sample_and_logp(batch["noise"])
            if "actor" in parts:  # 1812.05905, equation 9; during bc_iters likelihood replaces the critics
                value = frozen(self.critic)(code.detach(), action).amin(0)
                cloning = self.steps < cfg.bc_iters
                losses.terms["actor"] = alpha * logp - torch.where(cloning, dist.logp(batch["action"]), value)
            if "alpha" in parts:  # equation 18, on log(alpha)
                entropy = -float(self.size) if cfg.target_entropy == "auto" else cfg.target_entropy
                losses.terms["alpha"] = -self.log_alpha * (logp.detach() + entropy)
            losses.metrics["logp"] = logp.detach()
        return losses

    @torch.no_grad()
    def _target(self, batch: Batch, alpha: Tensor) -> tuple[Any, Tensor]:
        """Return the policy's distribution in ``next_obs``, and the critics' target: 1812.05905, equation 5."""
        dist, (code, _) = self.dist(batch["next_obs"]), self.target.encode(batch["next_obs"], {}, None)
        action, logp = dist.sample_and_logp(batch["next_noise"])
        value = self.target(code, action).amin(0)
        if not self.cfg.deterministic_backup:
            value = value - alpha * logp
        return dist, batch["returns"] + batch["discount"] * value

    def _soft_maximum(self, code: Tensor, dist: Any, next_dist: Any, batch: Batch) -> Tensor:
        """Estimate ``log integral exp Q(s, a) da [ensemble, B]`` from uniform actions and the policy's in s and s'."""
        with torch.no_grad():
            uniform = batch["uniform"].transpose(0, 1)
            here = dist.sample_and_logp(batch["sample_noise"].transpose(0, 1))
            there = next_dist.sample_and_logp(batch["next_sample_noise"].transpose(0, 1))
            density = torch.full_like(here[1], -self.size * math.log(2.0))  # of uniform actions in [-1, 1]
            action, log_density = torch.cat((uniform, here[0], there[0])), torch.cat((density, here[1], there[1]))
        return sampled_log_sum_exp(self.critic.several(code, action), log_density, self.cfg.temperature)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "critic" in parts:
            self.steps += 1
            polyak_(self.target, self.critic, self.cfg.tau)

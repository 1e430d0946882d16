"""Soft Actor-Critic, Haarnoja et al. 2018 (arXiv:1801.01290), with automatic temperature (arXiv:1812.05905).

Discrete actions follow Christodoulou 2019 (arXiv:1910.07207). Recurrent models learn from sequences, with separate
networks for the policy and the critics, as in Ni et al. 2022 (arXiv:2110.05038). One ``forward`` serves all cases:
``soft_value`` handles both kinds of actions; ``_encode`` and ``_unroll`` compute the features of transitions and of
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.priorities import sequence_priority
from rlplug.functional.quadrature import normal_points
from rlplug.functional.sequences import carry_before, longest, n_step_sequences, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.nn import Adam, choices_of, critic_for, frozen, soft_head, unroll
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


class SAC(Algorithm):
    traceable = True

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        distribution: Literal["squashed_gaussian", "beta"] = option("Distribution of continuous actions.")
        twin_q: bool = option("Two critics; targets and policy use the minimum.")
        tau: UnitFloat = option("Polyak step of the target critics.")
        target_update_period: PositiveInt = option("Critic updates between two updates of the target.")
        initial_alpha: PositiveFloat = option("Initial temperature.")
        target_entropy: Literal["auto"] | float = option("auto: -dim(action); discrete: see target_entropy_fraction.")
        target_entropy_fraction: UnitFloat = option("Discrete: auto is this fraction of the uniform policy's entropy.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        alpha_lr: Scheduled[NonNegativeFloat] | None = option("Adam's step size of log(alpha); null: alpha is fixed.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        sequence_length: PositiveInt = option("Recurrent: rows of a sample to train on.")
        burn_in: NonNegativeInt = option("Recurrent: rows before these that only warm up the states.")
        stride: PositiveInt = option("Recurrent: rows between the starts of two samples.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action, keys = spec.single_agent.action, ("obs", "action", "reward", "terminated", "valid")
        match action:
            case spaces.Box():
                if not action.is_bounded():
                    raise ConfigError("algo", f"sac needs bounded actions, and {action} is not; use algo=ppo")
            case spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
                keys = (*keys, "action_mask")
            case _:
                served = "Box, Discrete, MultiDiscrete and MultiBinary"
                raise ConfigError("algo", f"sac serves {served} actions, but they are {action}; use algo=ppo")
        return Needs(Window(longest(cfg.n_step)), data="windows", off_policy=True, perturbable=True, keys=keys)

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        ahead, keys = needs.window.length - 1, (*needs.keys, "is_first", "carry")
        return replace(needs, window=Window(cfg.sequence_length + ahead, cfg.burn_in, cfg.stride, ahead), keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        obs, action, ensemble_size = ctx.spec.single_agent.obs, ctx.spec.single_agent.action, 2 if cfg.twin_q else 1
        assert action.shape is not None
        self.shape, self.size, choices = action.shape, math.prod(action.shape), choices_of(action)
        self.sequences, self.discrete = ctx.needs.window.stride > 0, choices is not None
        self.model = ctx.build("model", obs)
        if self.sequences and not self.model.initial_carry(1):
            raise ConfigError("model", "has no recurrent state, but critic_model has; sac needs both, or the first")
        self.policy = soft_head(action, self.model.out_dim, cfg.distribution)
        build = partial(critic_for, partial(ctx.build, "critic_model"), obs, action, recurrent=self.sequences)
        self.critic, self.target = (build(ensemble_size=ensemble_size) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.critic.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.initial_alpha)), requires_grad=cfg.alpha_lr is not None)
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.alpha_lr = ctx.schedule(0.0 if cfg.alpha_lr is None else cfg.alpha_lr)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        def part(params, lr: Tensor) -> Optim:
            return Optim(Adam(params, lr=lr), self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)

        actor = [*self.model.parameters(), *self.policy.parameters()]
        parts = {"critic": part(self.critic.parameters(), self.critic_lr), "actor": part(actor, self.actor_lr)}
        return parts | ({"alpha": part([self.log_alpha], self.alpha_lr)} if self.cfg.alpha_lr is not None else {})

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("model.", "policy.")))

    # ---- acting ---------------------------------------------------------------------------------------------------

    def initial_carry(self, n: int) -> Batch:
        return self.model.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        dist, carry = self.dist(step, carry)
        n, uniform = step["is_first"].shape[0], mode == "random" and not self.discrete
        if mode == "greedy":
            action = dist.mode()
        elif uniform:
            action = self.ctx.rand(n, *self.shape) * 2.0 - 1.0
        else:
            dist = dist.uniform() if mode == "random" else dist
            action = dist.sample(self.policy.noise(self.ctx, n))
        out = {"action": action.view(-1, *self.shape)}
        if "logp" in self.ctx.needs.stored and mode != "greedy":
            out["logp"] = torch.full((n,), -self.size * math.log(2.0)) if uniform else dist.logp(out["action"])
        return out, carry

    def dist(self, rows: Batch, carry: Batch) -> tuple[Any, Batch]:
        features, carry = self.model(rows["obs"], carry, rows.get("is_first"))
        return self.policy(features, rows.get("action_mask")), carry

    def distribution(self, batch: Batch) -> Any:
        return self.dist(batch, carry_before(batch))[0]

    def logp(self, batch: Batch) -> Tensor:
        action, dist = batch["action"], self.distribution(batch)
        return dist.logp(action if self.discrete else action.reshape(*action.shape[:2], self.size))

    def values(self, batch: Batch) -> Tensor:
        """Return ``V = E[min Q - alpha log pi]``, see ``soft_value``; recurrent critics start with zero states."""
        code, _ = self.critic.encode(batch["obs"], {}, batch.get("is_first"))
        (dist, _), alpha = self.dist(batch, carry_before(batch)), self.log_alpha.exp()
        noise = [None] if self.discrete else normal_points(32, self.policy.noise_size).to(code)  # always the same
        return torch.stack([self.soft_value(self.critic, code, dist, x, alpha)[0] for x in noise]).mean(0)

    # ---- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """Sum ``n_step`` rewards, and sample the noise of both reparameterized actions."""
        if self.sequences:
            out = n_step_sequences(batch, self.cfg.gamma, self.cfg.n_step, self.cfg.burn_in, self.ctx.randint)
        else:
            out = n_step_transitions(batch, self.cfg.gamma, self.cfg.n_step, self.ctx.randint)
        out["action"] = out["action"].flatten(out["returns"].ndim) if self.shape else out["action"].unsqueeze(-1)
        if not self.discrete:
            *lead, n = out["returns"].shape  # every rank takes the noise of its own columns
            out |= {k: self.ctx.randn(n, *lead, self.policy.noise_size).movedim(0, -2) for k in ("noise", "next_noise")}
            out["action"] = out["action"].clamp(-1.0, 1.0)  # as executed, if another policy recorded them
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute all three losses in one graph; every parameter gets the gradient of its own loss only."""
        alpha = self.log_alpha.exp().detach()
        losses = Losses({}, {"temperature": alpha})
        rows = self._unroll(batch) if self.sequences else self._encode(batch, parts)
        if "critic" in parts:  # 1812.05905, equations 5 and 6
            with torch.no_grad():
                next_dist = self.policy(rows["next_features"], batch.get("next_action_mask"))
                next_noise = batch.get("next_noise")
                next_value, _ = self.soft_value(self.target, rows["next_code"], next_dist, next_noise, alpha)
                target = batch["returns"] + batch["discount"] * next_value
            q = self.critic(rows["code"], batch["action"])
            error = q - target
            loss = 0.5 * error.square().sum(0)
            losses.terms["critic"] = loss * batch["weight"] if "weight" in batch else loss
            losses.metrics["q"] = q[0].detach()
            error = error.detach().abs().mean(0)
            losses.feedback["priority"] = sequence_priority(error, batch["valid"]) if self.sequences else error
        if "actor" in parts or "alpha" in parts:
            dist = self.policy(rows["features"], batch.get("action_mask"))
            critic, code = frozen(self.critic), rows["code"].detach()
            value, logp = self.soft_value(critic, code, dist, batch.get("noise"), alpha)
            if "actor" in parts:  # equation 9
                losses.terms["actor"] = -value
            if "alpha" in parts:  # equation 18, on log(alpha)
                losses.terms["alpha"] = -self.log_alpha * (logp.detach() + self.target_entropy(dist))
            losses.metrics["logp"] = logp.detach()
        return losses

    def _encode(self, batch: Batch, parts: Sequence[str]) -> Batch:
        """Compute the policy's and the critics' features of transitions ``[B, ...]`` that ``parts`` need."""
        rows: Batch = {}
        if "actor" in parts or "alpha" in parts:
            rows["features"], _ = self.model(batch["obs"], {}, None)
        rows["code"], _ = self.critic.encode(batch["obs"], {}, None)
        if "critic" in parts:
            with torch.no_grad():
                rows["next_features"], _ = self.model(batch["next_obs"], {}, None)
                rows["next_code"], _ = self.target.encode(batch["next_obs"], {}, None)
        return rows

    def _unroll(self, batch: Batch) -> Batch:
        """Compute the same for sequences ``[L, B, ...]``, by one pass of each network.

        The policy starts with its stored state, the critics with zero states.
        """
        last, length, burn_in = batch["last"], len(batch["returns"]), self.cfg.burn_in
        columns = torch.arange(last.shape[1], device=last.device)
        features = unroll(self.model, batch, tree.map(lambda x: x[0], batch["carry"]), burn_in)
        code = unroll(self.critic.encode, batch, {}, burn_in)
        with torch.no_grad():
            next_features = features[last, columns]
            next_code = unroll(self.target.encode, batch, {}, burn_in)[..., last, columns, :]
        now = {"features": features[:length], "code": code[..., :length, :, :]}
        return now | {"next_features": next_features, "next_code": next_code}

    def soft_value(
        self, critic: Callable[..., Tensor], code: Tensor, dist: Any, noise: Tensor | None, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``V = E[min Q - alpha log pi]`` and ``E[log pi]``, both ``[...]``.

        Continuous actions: from one sample, 1812.05905, equation 3. Discrete actions: exactly, 1910.07207, equation 10;
        with several factors, ``Q`` is their sum and ``pi`` their product.
        """
        if not self.discrete:
            action, logp = dist.sample_and_logp(noise)
            return critic(code, action).amin(0) - alpha * logp, logp
        p = dist.log_probs.exp()
        logp = (p * dist.log_probs).sum((-2, -1))
        return (p * critic(code).amin(0)).sum((-2, -1)) - alpha * logp, logp

    def target_entropy(self, dist: Any) -> Tensor | float:
        """Return the target entropy of the temperature; for discrete actions one per row, ``[...]``."""
        if self.cfg.target_entropy != "auto":
            return self.cfg.target_entropy
        if not self.discrete:
            return -float(self.size)
        return self.cfg.target_entropy_fraction * dist.allowed.sum(-1).log().sum(-1)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "critic" in parts:
            self.steps += 1
            every = self.cfg.target_update_period
            polyak_(self.target, self.critic, self.cfg.tau, None if every == 1 else self.steps % every == 0)

"""Deep Deterministic Policy Gradient, Lillicrap et al. 2016 (arXiv:1509.02971), and Twin Delayed DDPG, Fujimoto et al.
2018 (arXiv:1802.09477), which adds ``twin_q``, ``policy_delay`` and ``target_noise``. ``bc_alpha`` also gives offline
TD3+BC, Fujimoto & Gu 2021 (arXiv:2106.06860).

Recurrent models learn from sequences, with separate networks for the policy and the critics, as in Ni et al. 2022
(arXiv:2110.05038). ``_transitions`` and ``_unroll`` compute the inputs of ``forward`` for transitions and sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.priorities import sequence_priority
from rlplug.functional.sequences import carry_before, longest, n_step_segment, n_step_sequences, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.functional.td import huber
from rlplug.nn import Adam, Linear, critic_for, frozen, precise, unroll
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


class Actor(nn.Module):
    """Maps observations to actions ``[..., size]`` in [-1, 1]: a torso, and tanh of a linear layer."""

    def __init__(self, ctx: Context, size: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build("model", ctx.spec.single_agent.obs)
        self.out = Linear(self.torso.out_dim, size)

    def forward(self, obs: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        features, carry = self.torso(obs, carry, is_first)
        return torch.tanh(precise(self.out, features)), carry


class DDPG(Algorithm):
    traceable = True

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        twin_q: bool = option("Two critics; the target uses the minimum.")
        policy_delay: PositiveInt = option("Critic updates per update of the policy and the target networks.")
        target_noise: NonNegativeFloat = option(
            "Target policy smoothing: standard deviation of the noise on its actions in [-1, 1]; 0: off."
        )
        noise_clip: NonNegativeFloat = option("Clip of that noise.")
        tau: UnitFloat = option("Polyak step of the target networks.")
        target_update_period: PositiveInt = option("Policy updates between two updates of the target networks.")
        td_error_loss_fn: Literal["huber", "mse"] = option("Loss of the critics' TD error.")
        huber_threshold: PositiveFloat = option("Error beyond which the Huber loss is linear.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        worker_side_prioritization: bool = option("Actors compute initial priorities; false: the largest so far.")
        bc_alpha: PositiveFloat | None = option(
            "TD3+BC, for offline RL: weight of the value relative to imitation; null: off."
        )
        l2_reg: NonNegativeFloat = option("Weight of the L2 regularization of policy and critics.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        sequence_length: PositiveInt = option("Recurrent: rows of a sample to train on.")
        burn_in: NonNegativeInt = option("Recurrent: rows before these that only warm up the states.")
        stride: PositiveInt = option("Recurrent: rows between the starts of two samples.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.single_agent.action
        if not (isinstance(action, spaces.Box) and action.is_bounded()):
            said = f"needs continuous actions within bounds, but the environment's are {action}"
            raise ConfigError("algo", f"{said}; use algo=ppo")
        window, keys = Window(longest(cfg.n_step)), ("obs", "action", "reward", "terminated", "valid")
        keys += ("priority",) if cfg.worker_side_prioritization else ()
        return Needs(window, data="windows", off_policy=True, perturbable=True, noise="gaussian", keys=keys)

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        ahead, keys = needs.window.length - 1, (*needs.keys, "is_first", "carry")
        return replace(needs, window=Window(cfg.sequence_length + ahead, cfg.burn_in, cfg.stride, ahead), keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        obs, action = ctx.spec.single_agent.obs, ctx.spec.single_agent.action
        assert action.shape is not None
        self.shape, self.size = action.shape, math.prod(action.shape)
        self.sequences = ctx.needs.window.stride > 0
        self.actor, self.target_actor = (Actor(ctx, self.size) for _ in range(2))
        if self.sequences and not self.initial_carry(1):
            raise ConfigError("model", "has no recurrent state, but critic_model has; the policy needs one too")
        build = partial(critic_for, partial(ctx.build, "critic_model"), obs, action, recurrent=self.sequences)
        self.critic, self.target_critic = (build(ensemble_size=2 if cfg.twin_q else 1) for _ in range(2))
        for target, online in self._pairs():
            target.requires_grad_(False).load_state_dict(online.state_dict())
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.q_scale: Tensor
        if cfg.bc_alpha is not None:
            self.register_buffer("q_scale", torch.ones(()))

    def _pairs(self) -> tuple[tuple[nn.Module, nn.Module], ...]:
        return (self.target_actor, self.actor), (self.target_critic, self.critic)

    def optimizers(self) -> dict[str, Optim]:
        def part(module: nn.Module, lr: Tensor, every: int) -> Optim:
            adam = Adam(module.parameters(), lr=lr, weight_decay=self.cfg.l2_reg)
            return Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, every, lr)

        critic, actor = part(self.critic, self.critic_lr, 1), part(self.actor, self.actor_lr, self.cfg.policy_delay)
        return {"critic": critic, "actor": actor}

    def actor_keys(self) -> tuple[str, ...]:
        acting = ("actor.", "critic.") if self.cfg.worker_side_prioritization else ("actor.",)
        return tuple(name for name in self.state_dict() if name.startswith(acting))

    def initial_carry(self, n: int) -> Batch:
        return self.actor.torso.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        action, carry = self.actor(step["obs"], carry, step["is_first"])
        if mode == "random":
            action = self.ctx.rand(*action.shape) * 2.0 - 1.0
        return {"action": action.view(-1, *self.shape)}, carry

    def values(self, batch: Batch) -> Tensor:
        """Return the minimum of ``Q(s, pi(s))`` over the critics; recurrent critics start with zero states."""
        action, _ = self.actor(batch["obs"], carry_before(batch), batch.get("is_first"))
        code, _ = self.critic.encode(batch["obs"], {}, batch.get("is_first"))
        return self.critic(code, action).amin(0)

    def prepare(self, batch: Batch) -> Batch:
        """Sum ``n_step`` rewards, and sample the noise of the target policy's actions."""
        if self.sequences:
            out = n_step_sequences(batch, self.cfg.gamma, self.cfg.n_step, self.cfg.burn_in, self.ctx.randint)
        else:
            out = n_step_transitions(batch, self.cfg.gamma, self.cfg.n_step, self.ctx.randint)
        out["action"] = out["action"].reshape(*out["returns"].shape, self.size).clamp(-1.0, 1.0)  # as executed
        if self.cfg.target_noise:
            *lead, columns = out["returns"].shape  # every rank takes the noise of its own columns
            out["next_noise"] = self.ctx.randn(columns, *lead, self.size).transpose(0, len(lead))
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute both losses in one graph; every parameter gets the gradient of its own loss only."""
        losses, cfg = Losses({}), self.cfg
        rows = self._unroll(batch) if self.sequences else self._transitions(batch, parts)
        if "critic" in parts:  # 1802.09477, algorithm 1
            with torch.no_grad():
                next_action = rows["next_action"]
                if "next_noise" in batch:  # equations 14 and 15
                    noise = (cfg.target_noise * batch["next_noise"]).clamp(-cfg.noise_clip, cfg.noise_clip)
                    next_action = (next_action + noise).clamp(-1.0, 1.0)
                next_value = self.target_critic(rows["next_code"], next_action).amin(0)
                target = batch["returns"] + batch["discount"] * next_value
            q = self.critic(rows["code"], batch["action"])
            error = q - target
            loss = huber(error, cfg.huber_threshold) if cfg.td_error_loss_fn == "huber" else 0.5 * error.square()
            losses.terms["critic"] = loss.sum(0) * batch["weight"] if "weight" in batch else loss.sum(0)
            error = error.detach().abs().mean(0)
            losses.metrics |= {"q": q[0].detach(), "td_error": error}
            if cfg.bc_alpha is not None:
                losses.metrics["abs_q"] = q[0].detach().abs()
            losses.feedback["priority"] = sequence_priority(error, batch["valid"]) if self.sequences else error
        if "actor" in parts:  # 1509.02971, equation 6, through the first critic
            value = frozen(self.critic)(rows["code"].detach(), rows["policy_action"])[0]
            losses.terms["actor"] = -value
            if cfg.bc_alpha is not None:  # 2106.06860, equations 3 and 5
                cloning = (rows["policy_action"] - batch["action"]).square().mean(-1)
                losses.terms["actor"] = cloning - cfg.bc_alpha / self.q_scale * value
        return losses

    def initial_priorities(self, batch: Batch) -> Tensor:
        """Return TD errors, with the acting networks as targets: arXiv:1803.00933, algorithm 1."""
        rows = n_step_segment(batch, self.cfg.gamma, self.cfg.n_step)
        code, _ = self.critic.encode(batch["obs"], {}, batch["is_first"])
        action, _ = self.actor(batch["obs"], carry_before(batch), batch["is_first"])
        value, columns = self.critic(code, action).amin(0), torch.arange(action.shape[1], device=action.device)
        target = rows["returns"] + rows["discount"] * value[rows["last"], columns]
        q = self.critic(code, batch["action"].reshape(*action.shape))[:, :-1]
        return (q - target).abs().mean(0)

    def _transitions(self, batch: Batch, parts: Sequence[str]) -> Batch:
        """Compute the policies' actions and the critics' features of transitions ``[B, ...]`` that ``parts`` need."""
        rows: Batch = {"code": self.critic.encode(batch["obs"], {}, None)[0]}
        if "actor" in parts:
            rows["policy_action"], _ = self.actor(batch["obs"], {}, None)
        if "critic" in parts:
            with torch.no_grad():
                rows["next_action"], _ = self.target_actor(batch["next_obs"], {}, None)
                rows["next_code"], _ = self.target_critic.encode(batch["next_obs"], {}, None)
        return rows

    def _unroll(self, batch: Batch) -> Batch:
        """Compute the same for sequences ``[L, B, ...]``: policies from the stored state, critics from zero states."""
        last, length, burn_in, carry = batch["last"], len(batch["returns"]), self.cfg.burn_in, carry_before(batch)
        columns = torch.arange(last.shape[1], device=last.device)
        code = unroll(self.critic.encode, batch, {}, burn_in)[..., :length, :, :]
        rows: Batch = {"code": code, "policy_action": unroll(self.actor, batch, carry, burn_in)[:length]}
        with torch.no_grad():
            rows["next_action"] = unroll(self.target_actor, batch, carry, burn_in)[last, columns]
            rows["next_code"] = unroll(self.target_critic.encode, batch, {}, burn_in)[..., last, columns, :]
        return rows

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if self.cfg.bc_alpha is not None:  # for the next step: a mean over all ranks
            self.q_scale.copy_(losses.metrics["abs_q"].clamp(min=1e-6))
        if "actor" in parts:
            self.steps += 1
            due = self.steps % self.cfg.target_update_period == 0
            for target, online in self._pairs():
                polyak_(target, online, self.cfg.tau, due)

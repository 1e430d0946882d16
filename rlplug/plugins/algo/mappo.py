"""Multi-agent PPO, Yu et al. 2022 (arXiv:2103.01955): the agents of a group share a policy, and a critic that may see
more than they do: the global state, or the observations of all agents. With ``critic_sees: own`` it is IPPO (de Witt et
al. 2020, arXiv:2011.09533). The critic learns normalized returns, section 5.1 of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import nn
from rlplug.agents import Policies, Policy, agents_of, of_groups, spec_of, with_ids
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.mixing import present
from rlplug.functional.policy_gradient import clipped_surrogate
from rlplug.functional.returns import gae
from rlplug.functional.sequences import carry_before, chunks
from rlplug.functional.td import huber
from rlplug.nn import Adam, Distribution, Linear, precise
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
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode


@dataclass(frozen=True)
class Central:
    """The learner of one group as a chosen algorithm, whose critic's input is ``seen``."""

    cfg: MAPPO.Config
    seen: spaces.Space[Any]
    key: str = "algo"
    name: str = "mappo"

    def needs(self, spec: EnvSpec) -> Needs:
        keys = ("obs", "action", "reward", "terminated", "valid", "logp", "action_mask")
        return Needs(keys=(*keys, "state") if self.cfg.critic_sees == "state" else keys)

    def recurrent(self, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=self.cfg.max_seq_len), keys=(*needs.keys, "is_first", "carry"))

    def build(self, ctx: Context) -> CentralPPO:
        return CentralPPO(self.cfg, ctx, self.seen)


class MAPPO(Policies):
    traceable = True

    @settings
    class Config(PolicyOptions):
        critic_sees: Literal["state", "observations", "own"] = option(
            "Input of the critic: the global state and the agent's observation; all observations; its own (IPPO)."
        )
        agent_ids: bool = option("Append a one-hot code of the agent to the inputs of policy and critic.")
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critic.")
        adam_epsilon: PositiveFloat = option("Adam's epsilon.")
        sgd_minibatch_size: PositiveInt | None = option("Rows of agents per gradient step; null: the whole rollout.")
        num_sgd_iter: PositiveInt = option("Epochs over each rollout.")
        clip_param: Scheduled[NonNegativeFloat] = option("Epsilon of the clipped surrogate.")
        vf_clip_param: PositiveFloat | None = option("Clip of the change of the normalized value; null: unclipped.")
        huber_threshold: PositiveFloat = option("Error beyond which the value's Huber loss is linear.")
        normalize_value: UnitFloat | None = option("Decay of the mean and variance of returns; null: not normalized.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        normalize_advantage: bool = option("Over the rollout's agents, on all ranks.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        max_seq_len: PositiveInt = option("Recurrent: rows unrolled at once from the stored state.")

    @classmethod
    def policies(cls, cfg: Config, spec: EnvSpec) -> dict[str, Policy]:
        found = dict[str, Policy]()
        for name, agents in of_groups(agents_of(spec)).items():
            own, ids = spec_of(spec, agents), len(agents) if cfg.agent_ids and len(agents) > 1 else 0
            obs = seen = own.single_agent.obs
            if ids or cfg.critic_sees != "own":
                size, seen_groups = vector(obs, name), spec.groups.items() if cfg.critic_sees == "observations" else ()
                wide = sum(max(1, len(group.agents)) * vector(group.obs, key) for key, group in seen_groups)
                if cfg.critic_sees == "state":
                    wide = vector(spec.extras.get("state"), "state") + size
                seen = box((wide or size) + ids)
                own = replace(own, groups={name: Group(box(size + ids), own.single_agent.action)}) if ids else own
            found[name] = Policy(Central(cfg, seen), agents, own)
        return found

    @classmethod
    def sharing(cls, cfg: Config) -> list[Any]:
        return [Central(cfg, box(1))]

    def view(self, batch: Batch, name: str) -> Batch:
        """Return the rows of a group's agents, with the input of their critic as ``central``."""
        rows, agents, spec = super().view(batch, name), len(self.players[name]), self.ctx.spec
        obs, sees = rows["obs"], self.cfg.critic_sees
        rows["central"] = obs
        if sees != "own":
            axis = batch["is_first"].ndim
            parts = [batch[key] if spec.nested else batch for key in spec.groups]
            here = [present(part["alive"], part["terminated"]) if axis == 2 else part["alive"] for part in parts]
            parts = [(part["obs"] * x.unsqueeze(-1)).flatten(axis) for part, x in zip(parts, here, strict=True)]
            wide = batch["state"] if sees == "state" else torch.cat(parts, -1)
            wide = wide.repeat_interleave(agents, axis - 1).to(obs.dtype)
            rows["central"] = torch.cat([wide, obs], -1) if sees == "state" else wide
        if self.cfg.agent_ids and agents > 1:
            rows |= {key: with_ids(rows[key], agents) for key in ("obs", "central")}
        return rows


class CentralPPO(Algorithm):
    """The policy and the critic of one group, on rows of a single agent that also have ``central``."""

    traceable = True
    Config = MAPPO.Config

    def __init__(self, cfg: MAPPO.Config, ctx: Context, seen: spaces.Space[Any]) -> None:
        super().__init__()
        self.cfg, self.ctx, self.sequences = cfg, ctx, ctx.needs.window.stride > 0
        rows = ctx.rollout_length * ctx.num_envs
        if (cfg.sgd_minibatch_size or 0) > rows:
            raise ConfigError(
                "algo.sgd_minibatch_size", f"{cfg.sgd_minibatch_size} is more than a rollout's {rows} rows"
            )
        group = ctx.spec.single_agent
        self.actor = nn.Policy(ctx.build("model", group.obs), group.action, cfg)
        self.torso = ctx.build("critic_model", seen)
        self.head = Linear(self.torso.out_dim, 1, gain=1.0)
        self.lr, self.critic_lr = ctx.schedule(cfg.lr), ctx.schedule(cfg.critic_lr)
        self.clip_param, self.entropy_coeff = ctx.schedule(cfg.clip_param), ctx.schedule(cfg.entropy_coeff)
        self.moments: Tensor
        self.register_buffer("moments", torch.zeros(3))  # decayed sums of returns, of their squares, and of ones

    @classmethod
    def needs(cls, cfg: MAPPO.Config, spec: EnvSpec) -> Needs:
        return Central(cfg, box(1)).needs(spec)

    def optimizers(self) -> dict[str, Optim]:
        critic = (*self.torso.parameters(), *self.head.parameters())
        clip, by, eps = self.cfg.grad_clip, self.cfg.grad_clip_by, self.cfg.adam_epsilon
        every = {"policy": (self.actor.parameters(), self.lr), "critic": (critic, self.critic_lr)}
        return {key: Optim(Adam(own, lr=lr, eps=eps), clip, by, lr=lr) for key, (own, lr) in every.items()}

    def initial_carry(self, n: int) -> Batch:
        carry = self.torso.initial_carry(n)
        return self.actor.initial_carry(n) | ({"value": carry} if carry else {})

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        out, after = self.actor.act(step, carry, mode, self.ctx)
        if "value" in carry:
            after["value"] = self.torso(step["central"], carry["value"], step["is_first"])[1]
        return out, after

    def distribution(self, batch: Batch) -> Distribution:
        return self.actor.dist(batch, carry_before(batch))[0]

    def values(self, batch: Batch) -> Tensor:
        mean, std = self.scale()
        return mean + std * self.normalized(batch)

    def normalized(self, batch: Batch) -> Tensor:
        """Return the critic's values of all rows, in units of normalized returns."""
        features, _ = self.torso(batch["central"], carry_before(batch).get("value", {}), batch.get("is_first"))
        return precise(self.head, features).squeeze(-1)

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of returns, 0-d; 0 and 1 before the first."""
        mean, square = (self.moments[:2] / self.moments[2].clamp(min=1e-5)).unbind()
        std = (square - mean.square()).clamp(min=1e-2).sqrt()
        return mean, torch.where(self.moments[2] > 0.0, std, torch.ones_like(std))

    def prepare(self, batch: Batch) -> Batch:
        value, (mean, std) = self.normalized(batch), self.scale()
        rows = batch["reward"], mean + std * value, batch["terminated"], batch["valid"]
        advantage, ret = gae(*rows, self.cfg.gamma, self.cfg.lambda_)
        keys = ("obs", "central", "action", "logp", "valid", "action_mask")
        keys += ("is_first", "carry") if self.sequences else ()
        prepared = {key: batch[key] for key in keys if key in batch}
        prepared |= {"value": value, "advantage": advantage, "returns": ret}
        return chunks(prepared, self.cfg.max_seq_len) if self.sequences else prepared

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute equations 1 and 2 of appendix A."""
        losses, cfg = Losses({}), self.cfg
        if "policy" in parts:
            dist, _ = self.actor.dist(batch, carry_before(batch))
            ratio, entropy = torch.exp(dist.logp(batch["action"]) - batch["logp"]), dist.entropy()
            losses.terms["policy"] = -clipped_surrogate(ratio, batch["advantage"], self.clip_param)
            if cfg.entropy_coeff:
                losses.terms["entropy"] = -self.entropy_coeff * entropy
            clipped = ((ratio - 1.0).abs() > self.clip_param).float()
            losses.metrics |= {"mean_entropy": entropy, "clip_fraction": clipped}
        if "critic" in parts:
            value, old, (mean, std) = self.normalized(batch), batch["value"], self.scale()
            target, clip, most = (batch["returns"] - mean) / std, cfg.vf_clip_param, cfg.huber_threshold
            losses.terms["value"] = huber(target - value, most)
            if clip is not None:
                near = old + (value - old).clamp(-clip, clip)
                losses.terms["value"] = torch.maximum(losses.terms["value"], huber(target - near, most))
        return losses

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses, valid, cfg = Losses({}), batch["valid"], self.cfg
        if cfg.normalize_advantage:
            mean, std = (learner.reduce(batch["advantage"], op, valid) for op in ("mean", "std"))
            batch["advantage"] = (batch["advantage"] - mean) / (std + 1e-5)
        unit = "column" if self.sequences else "row"
        size = cfg.sgd_minibatch_size or self.ctx.rollout_length * self.ctx.num_envs
        size = max(1, round(size / len(valid))) if self.sequences else size
        for _ in range(cfg.num_sgd_iter):
            for minibatch in learner.minibatches(batch, size, unit):
                self.observe_returns(minibatch, learner)
                losses = learner.minimize(minibatch, self)
        return losses

    def observe_returns(self, batch: Batch, learner: Learner) -> None:
        """Update the mean and the variance of returns, before they are targets."""
        if (beta := self.cfg.normalize_value) is not None:
            ret, valid = batch["returns"], batch.get("valid")
            mean, square = (learner.reduce(x, "mean", valid) for x in (ret, ret.square()))
            self.moments.lerp_(torch.stack([mean, square, torch.ones_like(mean)]), 1.0 - beta)


def box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


def vector(space: spaces.Space[Any] | None, name: str) -> int:
    """Return the size of a vector space. Raises ``ConfigError`` if it is not one."""
    if space is None:
        raise ConfigError("algo.critic_sees", f"the environment has no {name}; use observations")
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        said = f"needs vectors, but those of {name} are {space}"
        raise ConfigError("algo.critic_sees", f"{said}; use own with agent_ids=false")
    return space.shape[0]

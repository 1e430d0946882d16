"""Multi-Agent Deep Deterministic Policy Gradient, Lowe et al. 2017 (arXiv:1706.02275): every agent has a policy that
reads its own observation, and a critic that reads the observations and actions of all agents and is only used in
training.

Agents may be in several groups with different spaces. Discrete actions are one-hot vectors for the critics; policies
learn through relaxed samples, Jang et al. 2017 (arXiv:1611.01144). For the critics, the observation and the action of
an absent agent are 0. ``infer_policies`` is section 4.2: no agent knows the policies of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug import tree
from rlplug.agents import agents_of, merge, view
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.mixing import present
from rlplug.functional.relaxed import gumbel, one_hot_max, relaxed_one_hot
from rlplug.functional.targets import polyak_
from rlplug.functional.td import forbid, huber
from rlplug.nn import Adam, Flatten, Linear, Module, choices_of, frozen, precise
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class Net(Module):
    """The model of a slot and a linear layer: ``[..., *space]`` to ``[..., size]``."""

    def __init__(self, ctx: Context, slot: str, space: spaces.Space[Any], size: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build(slot, space)
        self.out = Linear(self.torso.out_dim, size)

    def forward(self, x: Any) -> Tensor:
        return precise(self.out, self.torso(x, {}, None)[0])


class Player(nn.Module):
    """The networks of agent ``own``: a critic of the observations and actions of all, and a policy.

    With ``infer``, ``policies`` are those of all agents, as this one estimates them. They return logits of discrete
    actions, or continuous actions before tanh.
    """

    def __init__(self, ctx: Context, acting: Sequence[tuple[Any, int]], own: int, joint: int, infer: bool) -> None:
        super().__init__()
        self.policies: Any = nn.ModuleList(
            Net(ctx, "model", *each) for each in (acting if infer else acting[own : own + 1])
        )
        self.own = own if infer else 0
        self.critic = Net(ctx, "critic_model", spaces.Box(-torch.inf, torch.inf, (joint,)), 1)

    @property
    def actor(self) -> Any:
        return self.policies[self.own]


class MADDPG(Algorithm):
    traceable = True
    online: Any  # players, by agent
    target: Any

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        tau: UnitFloat = option("Polyak step of the target networks.")
        target_update_period: PositiveInt = option("Updates between two updates of the target networks.")
        td_error_loss_fn: Literal["huber", "mse"] = option("Loss of the critics' TD error.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policies.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        relaxation: Literal["straight_through", "soft"] = option(
            "Discrete actions through which a policy learns: one-hot with the relaxed gradient, or relaxed."
        )
        temperature: PositiveFloat = option("Temperature of the relaxed actions.")
        output_reg: NonNegativeFloat = option("Weight of the mean squared outputs of a policy in its loss.")
        action_noise: Scheduled[NonNegativeFloat] = option(
            "Standard deviation of the exploration noise of continuous actions in [-1, 1]."
        )
        infer_policies: bool = option("Every agent learns estimates of the others' policies, for its target.")
        inference_entropy: NonNegativeFloat = option("Weight of the entropy of discrete estimates.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        for name, group in spec.groups.items():
            bounded = isinstance(group.action, spaces.Box) and group.action.is_bounded()
            if not (bounded or isinstance(group.action, spaces.Discrete)):
                said = f"needs Discrete actions, or Box actions within bounds, but those of {name} are {group.action}"
                raise ConfigError("env", f"maddpg {said}")
        if not spec.has_agents:
            raise ConfigError("env", "maddpg needs several agents, but the environment has one; use algo=ddpg")
        keys = ("obs", "action", "reward", "terminated", "valid", "alive", "action_mask")
        return Needs(Window(1), data="windows", off_policy=True, perturbable=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, self.agents = cfg, ctx, agents_of(ctx.spec)
        own = [ctx.spec.groups[agent.group] for agent in self.agents]
        self.discrete = [isinstance(group.action, spaces.Discrete) for group in own]
        self.flatten = [Flatten(group.obs) for group in own]
        self.sizes = [sum(choices_of(g.action) or (math.prod(g.action.shape or ()),)) for g in own]
        policies = [(group.obs, size) for group, size in zip(own, self.sizes, strict=True)]
        joint = sum(self.sizes) + sum(flatten.size for flatten in self.flatten)
        self.online, self.target = (
            nn.ModuleList(Player(ctx, policies, i, joint, cfg.infer_policies) for i in range(len(own)))
            for _ in range(2)
        )
        self.target.requires_grad_(False).load_state_dict(self.online.state_dict())
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.noise = ctx.schedule(cfg.action_noise)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        parts = dict[str, Optim]()
        for agent, own in zip(self.agents, self.online, strict=True):
            others = (net for net in own.policies if net is not own.actor)
            nets = {"critic": (own.critic, self.critic_lr), "actor": (own.actor, self.actor_lr)}
            nets |= {"others": (nn.ModuleList(others), self.actor_lr)} if self.cfg.infer_policies else {}
            for name, (net, lr) in nets.items():
                adam = Adam(net.parameters(), lr=lr)
                parts[f"{agent.name}/{name}"] = Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)
        return parts

    def actor_keys(self) -> tuple[str, ...]:
        acting = tuple(f"online.{i}.policies.{player.own}." for i, player in enumerate(self.online))
        return tuple(name for name in self.state_dict() if name.startswith(acting))

    def _draws(self, columns: int) -> list[Tensor]:
        """Return noise ``[B, size]`` for every agent's action: Gumbel if it is discrete, otherwise standard normal."""
        rand, randn = self.ctx.rand, self.ctx.randn
        each = zip(self.discrete, self.sizes, strict=True)
        return [gumbel(rand(columns, size)) if discrete else randn(columns, size) for discrete, size in each]

    def _action(self, i: int, out: Tensor, noise: Any, mask: Tensor | None) -> Tensor:
        """Return agent ``i``'s action from its policy's output: a vector ``[B, size]``, one-hot if it is discrete."""
        return one_hot_max(forbid(out + noise, mask)) if self.discrete[i] else torch.tanh(out)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return the ``action`` of every group; discrete ones are samples of the policies, except in greedy mode."""
        spec, outs, draws = self.ctx.spec, dict[str, Batch](), self._draws(len(step["is_first"]))
        for i, (agent, noise) in enumerate(zip(self.agents, draws, strict=True)):
            rows = view(step, spec, [agent])
            out = self.online[i].actor(rows["obs"]) * (mode != "random")
            action = self._action(i, out, noise * (mode != "greedy"), rows.get("action_mask"))
            if self.discrete[i]:
                action = action.argmax(-1)
            else:
                wide = torch.erf(noise / 2**0.5) if mode == "random" else self.noise * noise * (mode == "explore")
                action = (action + wide).clamp(-1.0, 1.0).view(-1, *(spec.groups[agent.group].action.shape or ()))
            outs[agent.name] = {"action": action}
        return merge(outs, {agent.name: [agent] for agent in self.agents}, spec), carry

    def prepare(self, batch: Batch) -> Batch:
        """Return each agent's transition, the joint observations for the critics, and the noise of the policies."""
        rows, joint, columns = dict[str, Batch](), list[Tensor](), batch["valid"].shape[1]
        noise, following = self._draws(columns), self._draws(columns)
        for i, agent in enumerate(self.agents):
            part = view(batch, self.ctx.spec, [agent])
            here, action = present(part["alive"], part["terminated"]), part["action"][0]
            if self.discrete[i]:
                action = (action.unsqueeze(-1) == torch.arange(self.sizes[i], device=action.device)).float()
            else:
                action = action.reshape(columns, -1).clamp(-1.0, 1.0)  # as executed
            joint.append(self.flatten[i](part["obs"]) * here.unsqueeze(-1))
            alive = part["alive"][0]
            own = {"alive": alive, "present": here[1], "noise": noise[i], "next_noise": following[i]}
            own |= {"action": action * alive.unsqueeze(-1), "reward": torch.where(alive, part["reward"][0], 0.0)}
            own["discount"] = self.cfg.gamma * (alive & ~part["terminated"][0])
            for key in ("obs", "action_mask"):
                if key in part:
                    own |= {key: tree.take(part[key], 0), f"next_{key}": tree.take(part[key], 1)}
            rows[agent.name] = own
        seen, then = torch.cat(joint, -1)
        return {"agents": rows, "seen": seen, "then": then} | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute all losses in one graph; every parameter gets the gradient of its own loss only."""
        losses, cfg, rows = Losses({}), self.cfg, [batch["agents"][agent.name] for agent in self.agents]
        acted, alive = [own["action"] for own in rows], torch.stack([own["alive"] for own in rows])
        errors, values = list[Tensor](), list[Tensor]()
        for i, (agent, player) in enumerate(zip(self.agents, self.online, strict=True)):
            own = rows[i]
            if f"{agent.name}/critic" in parts:  # equation 6
                with torch.no_grad():
                    inputs = torch.cat([batch["then"], *self._following(i, rows)], -1)
                    target = own["reward"] + own["discount"] * self.target[i].critic(inputs).squeeze(-1)
                q = player.critic(torch.cat([batch["seen"], *acted], -1)).squeeze(-1)
                error = (q - target) * own["alive"]
                loss = huber(error) if cfg.td_error_loss_fn == "huber" else 0.5 * error.square()
                losses.terms[f"{agent.name}/critic"] = loss * batch["weight"] if "weight" in batch else loss
                errors.append(error.detach().abs())
                values.append(q.detach() * own["alive"])
            if f"{agent.name}/actor" in parts:  # equation 5
                out = player.actor(own["obs"])
                action = torch.tanh(out)
                if self.discrete[i]:
                    hard, mask = cfg.relaxation == "straight_through", own.get("action_mask")
                    action = relaxed_one_hot(out + own["noise"], cfg.temperature, hard, mask)
                played = [*acted[:i], action * own["alive"].unsqueeze(-1), *acted[i + 1 :]]
                value = frozen(player.critic)(torch.cat([batch["seen"], *played], -1)).squeeze(-1)
                losses.terms[f"{agent.name}/actor"] = (cfg.output_reg * out.square().mean(-1) - value) * own["alive"]
            if f"{agent.name}/others" in parts:  # equation 7
                terms = [self._inference(k, net, rows[k]) for k, net in enumerate(player.policies) if k != i]
                losses.terms[f"{agent.name}/others"] = torch.stack(terms).sum(0)
        if errors:  # means over the agents alive
            count = alive.sum(0).clamp(min=1)
            losses.metrics = {"q": torch.stack(values).sum(0) / count, "td_error": torch.stack(errors).sum(0) / count}
            losses.feedback = {"priority": losses.metrics["td_error"]}
        return losses

    def _following(self, i: int, rows: list[Batch]) -> list[Tensor]:
        """Sample all agents' actions in the next row by the target policies, or as agent ``i`` estimates them."""
        inferred, found = self.cfg.infer_policies, list[Tensor]()
        policies = self.target[i].policies if inferred else [player.actor for player in self.target]
        for k, (policy, own) in enumerate(zip(policies, rows, strict=True)):
            action = self._action(k, policy(own["next_obs"]), own["next_noise"], own.get("next_action_mask"))
            found.append(action * own["present"].unsqueeze(-1))
        return found

    def _inference(self, k: int, policy: Any, rows: Batch) -> Tensor:
        """Compute the loss ``[B]`` of an estimate of agent ``k``'s policy.

        It is the negative log-likelihood minus the weighted entropy; for continuous actions, the mean squared error.
        """
        out, action = policy(rows["obs"]), rows["action"]
        if not self.discrete[k]:
            return (torch.tanh(out) - action).square().mean(-1) * rows["alive"]
        logp = forbid(out, rows.get("action_mask")).log_softmax(-1)
        return ((self.cfg.inference_entropy * logp.exp() - action) * logp).sum(-1) * rows["alive"]

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        self.steps += 1
        polyak_(self.target, self.online, self.cfg.tau, self.steps % self.cfg.target_update_period == 0)

"""Multi-Agent Deep Deterministic Policy Gradient, Lowe et al. 2017 (arXiv:1706.02275): every agent has a policy of its
own observation, and a critic of the observations and actions of all, which is only used in training.

Agents may be in several groups with different spaces. Discrete actions are one-hot vectors for the critics; policies
learn through relaxed samples, Jang et al. 2017 (arXiv:1611.01144). What an agent that is not present observed and did
is 0 for the critics. ``infer_policies`` is section 4.2: no agent knows the policies of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.mixing import present
from rlplug.functional.relaxed import gumbel, one_hot_max, relaxed_one_hot
from rlplug.functional.targets import polyak_
from rlplug.functional.td import forbid, huber
from rlplug.nn import Adam, Flatten, Linear, Module, choices_of, frozen, precise
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class Agent(NamedTuple):
    """An agent: its group, its place on the group's agent axis (None: there is no axis), and its spaces."""

    group: str
    place: int | None
    name: str
    obs: Any
    size: int  # of its action as a vector
    discrete: bool


def agents_of(spec: EnvSpec) -> list[Agent]:
    """Return all agents, in the order of groups and places."""
    found = list[Agent]()
    for name, group in spec.groups.items():
        choices = choices_of(group.action)
        size = sum(choices) if choices else math.prod(group.action.shape or ())
        for place, agent in enumerate(group.agents or ("",)):
            found.append(Agent(name, place if agent else None, agent or name, group.obs, size, bool(choices)))
    return found


class Policy(Module):
    """Maps an observation to logits of discrete actions, or to continuous actions before tanh: ``[..., size]``."""

    def __init__(self, ctx: Context, agent: Agent) -> None:
        super().__init__()
        self.torso: Model = ctx.build("model", agent.obs)
        self.out = Linear(self.torso.out_dim, agent.size)

    def forward(self, obs: Any) -> Tensor:
        return precise(self.out, self.torso(obs, {}, None)[0])


class Joint(Module):
    """A critic: maps the observations and actions of all agents, one vector ``[B, S]``, to ``Q_i [B]``."""

    def __init__(self, ctx: Context, size: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build("critic_model", spaces.Box(-torch.inf, torch.inf, (size,)))
        self.out = Linear(self.torso.out_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return precise(self.out, self.torso(x, {}, None)[0]).squeeze(-1)


class Player(nn.Module):
    """The networks of one agent; ``others`` are its estimates of the policies of the others, if it infers them."""

    def __init__(self, ctx: Context, agent: Agent, others: Sequence[Agent], size: int) -> None:
        super().__init__()
        self.actor, self.critic = Policy(ctx, agent), Joint(ctx, size)
        self.others = nn.ModuleList(Policy(ctx, other) for other in others)


class MADDPG(Algorithm):
    traceable = True

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        tau: UnitFloat = option("Polyak step of the target networks.")
        target_network_update_freq: PositiveInt = option("Updates between two updates of the target networks.")
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
        self.flatten = [Flatten(agent.obs) for agent in self.agents]
        self.sizes = [agent.size for agent in self.agents]
        size = sum(self.sizes) + sum(flatten.size for flatten in self.flatten)

        def players() -> nn.ModuleList:
            others = [[other for other in self.agents if other is not agent] for agent in self.agents]
            infer = zip(self.agents, others, strict=True)
            return nn.ModuleList(Player(ctx, a, them if cfg.infer_policies else (), size) for a, them in infer)

        self.online, self.target = players(), players()
        self.target.requires_grad_(False).load_state_dict(self.online.state_dict())
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.noise = ctx.schedule(cfg.action_noise)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def _each(self) -> Iterator[tuple[int, Agent, Any, Any]]:
        """Yield number, agent, and its online and target networks."""
        return zip(range(len(self.agents)), self.agents, self.online, self.target, strict=True)  # type: ignore[arg-type]

    def optimizers(self) -> dict[str, Optim]:
        parts = dict[str, Optim]()
        for _, agent, own, _ in self._each():
            nets = {"critic": (own.critic, self.critic_lr), "actor": (own.actor, self.actor_lr)}
            nets |= {"others": (own.others, self.actor_lr)} if self.cfg.infer_policies else {}
            for name, (net, lr) in nets.items():
                adam = Adam(net.parameters(), lr=lr)
                parts[f"{agent.name}/{name}"] = Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)
        return parts

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("online.") and ".actor." in name)

    def _part(self, batch: Batch, agent: Agent, axis: int, *keys: str) -> Batch:
        """Return an agent's own leaves; those of its group have the agent axis on ``axis``."""
        rows = batch[agent.group] if self.ctx.spec.nested else batch
        rows = {key: rows[key] for key in keys if key in rows}
        return rows if agent.place is None else tree.map(lambda x: x.select(axis, agent.place), rows)

    def _draws(self, columns: int) -> list[Tensor]:
        """Return noise ``[B, size]`` for every agent's action: Gumbel if it is discrete, otherwise standard normal."""
        rand, randn = self.ctx.rand, self.ctx.randn
        return [gumbel(rand(columns, a.size)) if a.discrete else randn(columns, a.size) for a in self.agents]

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return the ``action`` of every group. Discrete ones are samples of the policies, unless in greedy mode."""
        columns, taken = len(step["is_first"]), dict[str, list[Tensor]]()
        draws = None if mode == "greedy" else self._draws(columns)
        for i, agent, own, _ in self._each():
            rows, group = self._part(step, agent, 1, "obs", "action_mask"), self.ctx.spec.groups[agent.group]
            out, noise = own.actor(rows["obs"]), 0.0 if draws is None else draws[i]
            out = torch.zeros_like(out) if mode == "random" else out
            if agent.discrete:
                action = forbid(out + noise, rows.get("action_mask")).argmax(-1)
            else:
                wide = torch.erf(noise / 2**0.5) if mode == "random" else self.noise * noise  # erf: uniform
                action = (torch.tanh(out) + wide).clamp(-1.0, 1.0).view(columns, *(group.action.shape or ()))
            taken.setdefault(agent.group, []).append(action)
        joint = {
            name: {"action": torch.stack(taken[name], 1) if group.agents else taken[name][0]}
            for name, group in self.ctx.spec.groups.items()
        }
        return joint if self.ctx.spec.nested else next(iter(joint.values())), carry

    def prepare(self, batch: Batch) -> Batch:
        """Return each agent's transition, the joint observations for the critics, and the noise of the policies."""
        rows, seen, then = dict[str, Batch](), list[Tensor](), list[Tensor]()
        columns = batch["valid"].shape[1]
        for (_, agent, *_), noise, following in zip(
            self._each(), self._draws(columns), self._draws(columns), strict=True
        ):
            part = self._part(batch, agent, 2, "obs", "action", "reward", "terminated", "alive", "action_mask")
            alive, there = part["alive"][0], present(part["alive"], part["terminated"])[1]
            obs, action = self.flatten[len(seen)](part["obs"]), part["action"][0]
            if agent.discrete:
                action = (action.unsqueeze(-1) == torch.arange(agent.size, device=action.device)).float()
            else:
                action = action.reshape(columns, agent.size).clamp(-1.0, 1.0)  # as executed
            seen.append(obs[0] * alive.unsqueeze(-1))
            then.append(obs[1] * there.unsqueeze(-1))
            masks = {"mask": part["action_mask"][0], "next_mask": part["action_mask"][1]} if "action_mask" in part else {}
            rows[agent.name] = masks | {
                "obs": tree.take(part["obs"], 0),
                "next_obs": tree.take(part["obs"], 1),
                "action": action * alive.unsqueeze(-1),
                "reward": torch.where(alive, part["reward"][0], 0.0),
                "discount": self.cfg.gamma * (alive & ~part["terminated"][0]),
                "alive": alive,
                "present": there,
                "noise": noise,
                "next_noise": following,
            }
        out = {"agents": rows, "seen": torch.cat(seen, -1), "then": torch.cat(then, -1)}
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def _next(self, agent: Agent, policy: Any, rows: Batch) -> Tensor:
        """Sample the action ``[B, size]`` of a target policy in the next row; 0 if the agent is not present."""
        out = policy(rows["next_obs"])
        if agent.discrete:
            action = one_hot_max(forbid(out + rows["next_noise"], rows.get("next_mask")))
        else:
            action = torch.tanh(out)
        return action * rows["present"].unsqueeze(-1)

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute all losses in one graph; every parameter gets the gradient of its own loss only."""
        losses, cfg, rows = Losses({}), self.cfg, [batch["agents"][agent.name] for agent in self.agents]
        acted, alive = [own["action"] for own in rows], torch.stack([own["alive"] for own in rows])
        weight, errors, values = batch.get("weight", 1.0), list[Tensor](), list[Tensor]()
        for i, agent, own, target in self._each():
            if f"{agent.name}/critic" in parts:  # equation 6
                with torch.no_grad():
                    following = target.critic(torch.cat([batch["then"], *self._following(i, rows)], -1))
                    goal = rows[i]["reward"] + rows[i]["discount"] * following
                q = own.critic(torch.cat([batch["seen"], *acted], -1))
                error = (q - goal) * alive[i]
                loss = huber(error) if cfg.td_error_loss_fn == "huber" else 0.5 * error.square()
                losses.terms[f"{agent.name}/critic"] = loss * weight
                errors.append(error.detach().abs())
                values.append(q.detach() * alive[i])
            if f"{agent.name}/actor" in parts:  # equation 5
                out = own.actor(rows[i]["obs"])
                action = torch.tanh(out)
                if agent.discrete:
                    hard, mask = cfg.relaxation == "straight_through", rows[i].get("mask")
                    action = relaxed_one_hot(out + rows[i]["noise"], cfg.temperature, hard, mask)
                played = [*acted[:i], action * alive[i].unsqueeze(-1), *acted[i + 1 :]]
                value = frozen(own.critic)(torch.cat([batch["seen"], *played], -1))
                losses.terms[f"{agent.name}/actor"] = (cfg.output_reg * out.square().mean(-1) - value) * alive[i]
            if f"{agent.name}/others" in parts:  # equation 7
                losses.terms[f"{agent.name}/others"] = self._inference(i, own.others, rows)
        if errors:
            count = alive.sum(0).clamp(min=1)
            losses.metrics = {"q": torch.stack(values).sum(0) / count, "td_error": torch.stack(errors).sum(0) / count}
            losses.feedback = {"priority": losses.metrics["td_error"]}
        return losses

    def _following(self, i: int, rows: list[Batch]) -> list[Tensor]:
        """Sample all agents' next actions by the target policies, or by agent ``i``'s estimates of the others'."""
        others = iter(self.target[i].others) if self.cfg.infer_policies else None
        policies = [p.actor if others is None or k == i else next(others) for k, _, _, p in self._each()]
        return [self._next(*three) for three in zip(self.agents, policies, rows, strict=True)]

    def _inference(self, i: int, others: Any, rows: list[Batch]) -> Tensor:
        """Return the negative log-likelihood of the others' actions, less their entropy; of continuous ones the MSE."""
        total = torch.zeros_like(rows[i]["reward"])
        those = [k for k in range(len(rows)) if k != i]
        for k, policy in zip(those, others, strict=True):
            out, action = policy(rows[k]["obs"]), rows[k]["action"]
            if self.agents[k].discrete:
                logp = forbid(out, rows[k].get("mask")).log_softmax(-1)
                loss = ((self.cfg.inference_entropy * logp.exp() - action) * logp).sum(-1)
            else:
                loss = (torch.tanh(out) - action).square().mean(-1)
            total = total + loss * rows[k]["alive"]
        return total

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        self.steps += 1
        due = self.steps % self.cfg.target_network_update_freq == 0
        polyak_(self.target, self.online, self.cfg.tau, due)

# pyright: strict
"""QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent RL, Rashid et al. 2018 (arXiv:1803.11485).

One group of N agents with equal spaces; whole episodes, padded: leaves ``[L+1, B, N, ...]``, ``state [L+1, B, S]``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.nn.functional import elu

from rlplug import tree
from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode


def team(spec: EnvSpec) -> Group:
    (group, *others) = spec.groups.values()
    if others or not group.agents or not isinstance(group.action, Discrete):
        raise ConfigError("env", "qmix needs one group of agents with discrete actions")
    return group


class Mixer(nn.Module):
    """Q_tot that never falls when a Q_i rises: weights from the state pass through ``abs``, biases do not."""

    def __init__(self, agents: int, state: int, hidden: int) -> None:
        super().__init__()
        self.agents, self.hidden = agents, hidden
        self.w1, self.b1 = nn.Linear(state, agents * hidden), nn.Linear(state, hidden)
        self.w2, self.b2 = nn.Linear(state, hidden), nn.Linear(state, 1)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """``q [..., N]``, ``state [..., S]`` to Q_tot ``[...]``."""
        w1: Tensor = self.w1(state).abs().unflatten(-1, (self.agents, self.hidden))
        hidden = elu((q.unsqueeze(-2) @ w1).squeeze(-2) + self.b1(state))
        return (hidden * self.w2(state).abs()).sum(-1) + self.b2(state).squeeze(-1)


class Team(nn.Module):
    """The shared network of the agents and their mixer."""

    def __init__(self, cfg: QMIX.Config, ctx: Context) -> None:
        super().__init__()
        group, state = team(ctx.spec), ctx.spec.extras["state"]
        assert isinstance(group.action, Discrete)
        assert group.obs.shape
        assert state.shape
        self.agents = len(group.agents)
        inputs = Box(-torch.inf, torch.inf, (group.obs.shape[0] + self.agents,))  # observation and agent id
        self.torso: Model = ctx.build("model", inputs)
        self.head = nn.Linear(self.torso.out_dim, int(group.action.n))
        self.mixer = Mixer(self.agents, state.shape[0], cfg.mixer_hidden)

    def values(self, rows: Batch, carry: Batch) -> tuple[Tensor, Batch]:
        """Q of each agent's actions ``[..., B, N, A]``; agents are folded into the columns for the model."""
        obs: Tensor = rows["obs"]
        ids = torch.eye(self.agents, device=obs.device).expand(*obs.shape[:-1], self.agents)
        x = torch.cat([obs, ids], -1).flatten(-3, -2)
        first = rows["is_first"].unsqueeze(-1).expand(obs.shape[:-1]).flatten(-2)
        features, carry = self.torso(x, tree.map(lambda c: c.flatten(0, 1), carry), first)
        q: Tensor = self.head(features).unflatten(-2, obs.shape[-3:-1])
        if "action_mask" in rows:
            q = q.masked_fill(~rows["action_mask"], -torch.inf)
        return q, tree.map(lambda c: c.unflatten(0, obs.shape[-3:-1]), carry)


class QMIX(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: PositiveFloat = option("RMSprop's step size.")
        mixer_hidden: PositiveInt = option("Width of the mixing network.")
        target_update: PositiveInt = option("Updates between two copies to the target network.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.online = Team(cfg, ctx)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        team(spec)
        if "state" not in spec.extras:
            raise ConfigError("env", "qmix needs an environment that offers its global state")
        keys = ("obs", "state", "action_mask", "alive", "action", "reward", "terminated")
        return Needs(data="episodes", off_policy=True, perturbable=True, keys=keys)

    def initial_carry(self, n: int) -> Batch:
        agents = self.online.agents
        return tree.map(lambda c: c.unflatten(0, (n, agents)), self.online.torso.initial_carry(n * agents))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        q, carry = self.online.values(step, carry)
        if mode == "random":
            q = self.ctx.rand(*q.shape).masked_fill(q.isneginf(), -1.0)
        return {"action": q.argmax(-1)}, carry  # [B, N]

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        start = self.initial_carry(batch["valid"].shape[1])  # an episode begins with it: nothing is stored
        online, _ = self.online.values(batch, start)  # [L+1, B, N, A]
        with torch.no_grad():
            target, _ = self.target.values(batch, start)
            best = online.argmax(-1, keepdim=True)
            bootstrap = self.target.mixer(self.silence(target.gather(-1, best), batch), batch["state"])
        taken = self.silence(online.gather(-1, batch["action"].unsqueeze(-1)), batch)
        total = self.online.mixer(taken, batch["state"])  # [L+1, B]
        over = batch["terminated"].all(-1)
        goal = batch["reward"].sum(-1) + self.cfg.gamma * (~over) * bootstrap.roll(-1, 0)
        return Losses({"td": (total[:-1] - goal[:-1]).square()}, {"q_total": total[:-1].detach()})

    @staticmethod
    def silence(q: Tensor, batch: Batch) -> Tensor:
        """Agents that have left, and actions that no padded row had, count nothing."""
        q = torch.where(q.squeeze(-1).isneginf(), 0.0, q.squeeze(-1))
        return q * batch["alive"] if "alive" in batch else q

    def optimizers(self) -> dict[str, Optim]:
        return {"q": Optim(torch.optim.RMSprop(self.online.parameters(), lr=self.cfg.lr), grad_clip=10.0)}

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if learner.progress.updates % self.cfg.target_update == 0:
            self.target.load_state_dict(self.online.state_dict())

    def actor_keys(self) -> tuple[str, ...]:
        names: dict[str, Any] = self.state_dict()
        return tuple(n for n in names if n.startswith("online.") and not n.startswith("online.mixer."))

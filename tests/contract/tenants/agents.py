"""Algorithms for several agents: VDN and QMIX, which mix their values, and independent learners that ignore masks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.nn.functional import elu

from rlplug.api import Algorithm, Context, Exploration, Learner, Losses, Needs, Optim
from rlplug.plugins.algo.independent import Independent
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode


class Sum(nn.Module):
    """VDN, Sunehag et al. 2018 (arXiv:1706.05296): Q_tot is the sum of all Q."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class Mixer(nn.Module):
    """QMIX: Q_tot never falls when a Q_i rises; weights from the state pass through ``abs``, biases do not."""

    def __init__(self, agents: int, state: int, hidden: int) -> None:
        super().__init__()
        self.shape = agents, hidden
        self.w1, self.b1 = nn.Linear(state, agents * hidden), nn.Linear(state, hidden)
        self.w2, self.b2 = nn.Linear(state, hidden), nn.Linear(state, 1)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """``q [..., N]``, ``state [..., S]`` to Q_tot ``[...]``."""
        w1 = self.w1(state).abs().unflatten(-1, self.shape)
        hidden = elu((q.unsqueeze(-2) @ w1).squeeze(-2) + self.b1(state))
        return (hidden * self.w2(state).abs()).sum(-1) + self.b2(state).squeeze(-1)


class Team(nn.Module):
    """The shared network of the agents, and their mixer."""

    def __init__(self, cfg: QMIX.Config, ctx: Context) -> None:
        super().__init__()
        group: Any = team(ctx.spec)
        state: Any = ctx.spec.extras["state"]
        self.agents = len(group.agents)
        inputs = Box(-torch.inf, torch.inf, (group.obs.shape[0] + self.agents,))  # observation and agent id
        self.torso = ctx.build("model", inputs)
        self.head = nn.Linear(self.torso.out_dim, int(group.action.n))
        size = state.shape[0]
        self.mixer = Sum() if cfg.mixer == "vdn" else Mixer(self.agents, size, cfg.mixer_hidden)

    def forward(self, obs: Tensor) -> Tensor:
        """Compute the values of every agent's actions: ``[..., N, F]`` to ``[..., N, A]``."""
        ids = torch.eye(self.agents, device=obs.device).expand(*obs.shape[:-1], self.agents)
        features, _ = self.torso(torch.cat([obs, ids], -1), {}, None)
        return self.head(features)


def team(spec: EnvSpec) -> Group:
    (group, *others) = spec.groups.values()
    if others or not group.agents or not isinstance(group.action, Discrete) or "state" not in spec.extras:
        raise ConfigError("env", "qmix needs one group of agents with discrete actions, and their global state")
    return group


class QMIX(Algorithm):
    """Rashid et al. 2018 (arXiv:1803.11485), equation 6, on single transitions; the reward is the agents' mean."""

    @settings
    class Config:
        mixer: Literal["vdn", "qmix"] = option("How values are mixed.")
        gamma: UnitFloat = option("Discount factor.")
        lr: PositiveFloat = option("Adam's step size.")
        mixer_hidden: PositiveInt = option("Width of the mixing network.")
        target_update: PositiveInt = option("Updates between two copies to the target network.")
        epsilon: UnitFloat = option("Share of random actions.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.online = Team(cfg, ctx)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        team(spec)
        return Needs(data="windows", off_policy=True, keys=("obs", "state", "action"))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        q = self.online(step["obs"])  # [B, N, A]
        action, epsilon = q.argmax(-1), {"random": 1.0, "explore": self.cfg.epsilon, "greedy": 0.0}[mode]
        if epsilon:
            drawn = self.ctx.randint(q.shape[-1], *action.shape)
            action = torch.where(self.ctx.rand(*action.shape) < epsilon, drawn, action)
        return {"action": action}, carry

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        online, alive = self.online(batch["obs"]), batch["alive"][0]  # [2, B, N, A], [B, N]
        going = alive & ~batch["terminated"][0]  # a truncated agent's last observation has a value
        with torch.no_grad():
            best = online[1].argmax(-1, keepdim=True)
            future = self.target(batch["obs"][1]).gather(-1, best).squeeze(-1)
            bootstrap = self.target.mixer(future * going, batch["state"][1])
            goal = batch["reward"][0].mean(-1) + self.cfg.gamma * going.any(-1) * bootstrap
        taken = online[0].gather(-1, batch["action"][0].unsqueeze(-1)).squeeze(-1)
        total = self.online.mixer(taken * alive, batch["state"][0])  # [B]
        return Losses({"td": (total - goal).square()[None]}, {"q_total": total.detach()[None]})

    def optimizers(self) -> dict[str, Optim]:
        return {"q": Optim(torch.optim.Adam(self.online.parameters(), lr=self.cfg.lr), grad_clip=10.0)}

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if (learner.progress.updates + 1) % self.cfg.target_update == 0:
            self.target.load_state_dict(self.online.state_dict())

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(n for n in self.state_dict() if n.startswith("online.") and not n.startswith("online.mixer."))


class Blind(Independent):
    """Independent learners that ignore masks."""

    @classmethod
    def needs(cls, cfg: Independent.Config, spec: EnvSpec) -> Needs:
        needs = super().needs(cfg, spec)
        return replace(needs, keys=tuple(key for key in needs.keys if key != "action_mask"))


class Novelty(Exploration):
    """Rewards every agent that acts by how much its observation changes."""

    knows_agents = True

    @settings
    class Config:
        scale: PositiveFloat = option("Factor of the reward.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.scale, self.nested = cfg.scale, ctx.spec.nested

    @classmethod
    def reads(cls, cfg: Config, spec: EnvSpec) -> tuple[str, ...]:
        return ("obs",)

    def intrinsic_reward(self, batch: Batch) -> Any:
        def of(part: Batch) -> Tensor:
            change = (part["obs"][1:] - part["obs"][:-1]).abs().sum(-1) * part["alive"][:-1]
            return torch.cat([self.scale * change, torch.zeros_like(change[:1])])

        return {name: of(batch[name]) for name in self.nested} if self.nested else of(batch)


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    algos, envs = "tests.contract.tenants.agents:", "tests.contract.tenants.teams:"
    found = [Component("algo", "qmix", algos + "QMIX", ("env=two_step",))]
    found += [Component("exploration", "novelty", algos + "Novelty", ("algo=independent", "env=carts"))]
    found += [Component("algo", "blind", algos + "Blind", ("env=carts",))]
    names = {"carts": "Carts", "signals": "Signals", "masked_signals": "MaskedSignals"}
    names["relay"] = "Relay"
    return found + [Component("env", name, envs + cls) for name, cls in names.items()]

@hookimpl
def rlplug_conf():
    return "rlplug_teams"
"""


INDEPENDENT = Path(__file__).parents[3] / "conf" / "algo" / "independent.yaml"
QMIX_YAML = """# @package _global_
defaults:
  - override /buffer: replay
  - override /model: mlp

num_envs: 8
train_batch_size: 64
replay_ratio: 0.125

algo:
  name: qmix
  mixer: qmix            # vdn or qmix
  gamma: 0.99            # discount factor
  lr: 5.0e-3             # Adam's step size
  mixer_hidden: 8        # width of the mixing network
  target_update: 50      # updates between two copies to the target network
  epsilon: 1.0           # share of random actions
"""
FILES = {
    "rlplug_teams/__init__.py": MANIFEST,
    "rlplug_teams/conf/algo/qmix.yaml": QMIX_YAML,
    "rlplug_teams/conf/algo/blind.yaml": INDEPENDENT.read_text().replace("name: independent", "name: blind"),
    "rlplug_teams/conf/exploration/novelty.yaml": "# @package exploration.novelty\nname: novelty\nscale: 0.5\n",
    "rlplug_teams/conf/env/carts.yaml": "name: carts\nagents: 2\nmax_steps: 500\n",
    "rlplug_teams/conf/env/signals.yaml": "name: signals\nmax_steps: 6\n",
    "rlplug_teams/conf/env/relay.yaml": "name: relay\nmax_steps: 9\n",
    "rlplug_teams/conf/env/masked_signals.yaml": "name: masked_signals\nmax_steps: 6\n",
}

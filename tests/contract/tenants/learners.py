"""Algorithms that live on whole episodes, and on refreshed recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlplug import Algorithm, Context, EnvSpec, Losses, Needs, Optim, Window, tree
from rlplug.functional import n_step_rows, reverse_scan, sequence_priority
from rlplug.nn import Adam, Linear, head_for
from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, Mode


class ActorCritic(Algorithm):
    """A policy and a value function on one model."""

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: PositiveFloat = option("Adam's step size.")
        vf_loss_coeff: NonNegativeFloat = option("Weight of the value loss.")
        entropy_coeff: NonNegativeFloat = option("Weight of the entropy bonus.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        self.model = ctx.build("model", group.obs)
        self.policy, self.critic = head_for(group.action, self.model.out_dim), Linear(self.model.out_dim, 1)

    def optimizers(self) -> dict[str, Optim]:
        return {"all": Optim(Adam(self.parameters(), lr=self.cfg.lr), grad_clip=1.0)}

    def both(self, rows: Batch):
        features = self.model(rows["obs"], {}, None)[0]
        return self.policy(features), self.critic(features).squeeze(-1)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        dist, _ = self.both(step)
        noise = self.policy.noise(self.ctx, len(step["is_first"]))
        action = dist.mode() if mode == "greedy" else dist.sample(noise)
        return {"action": action, "logp": dist.logp(action)}, carry


class MonteCarlo(ActorCritic):
    """REINFORCE on whole episodes: returns are what was really earned, and nothing bootstraps."""

    @classmethod
    def needs(cls, cfg: ActorCritic.Config, spec: EnvSpec) -> Needs:
        return Needs(data="episodes", keys=("obs", "action"))

    def prepare(self, batch: Batch) -> Batch:
        reward = torch.where(batch["valid"], batch["reward"], 0.0)
        return batch | {"returns": reverse_scan(torch.full_like(reward, self.cfg.gamma), reward)}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        dist, value = self.both(batch)
        advantage = batch["returns"] - value.detach()
        scale = advantage[batch["valid"]].abs().mean().clamp(min=1e-6)
        terms = {
            "policy": -dist.logp(batch["action"]) * advantage / scale,
            "value": self.cfg.vf_loss_coeff * ((value - batch["returns"]) / scale).square(),
            "entropy": -self.cfg.entropy_coeff * dist.entropy(),
        }
        return Losses(terms)


class Refreshing(Algorithm):
    """Recurrent Q-learning from stored states (Kapturowski et al. 2019) that it computes again and gives back."""

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: PositiveFloat = option("Adam's step size.")
        length: PositiveInt = option("Rows of a sample that are learned from.")
        burn_in: NonNegativeInt = option("Rows in front of them.")
        stride: PositiveInt = option("Rows between two stored states.")
        epsilon: UnitFloat = option("Share of random actions.")
        refresh: bool = option("Whether states are given back.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        return Needs(
            window=Window(cfg.length), data="windows", off_policy=True, perturbable=True, keys=("obs", "action")
        )

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        window = replace(needs.window, burn_in=cfg.burn_in, stride=cfg.stride)
        return replace(needs, window=window, keys=(*needs.keys, "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        self.model = ctx.build("model", group.obs)
        self.actions = int(group.action.n)
        self.head = nn.Linear(self.model.out_dim, self.actions)

    def optimizers(self) -> dict[str, Optim]:
        return {"q": Optim(Adam(self.parameters(), lr=self.cfg.lr), grad_clip=10.0)}

    def initial_carry(self, n: int) -> Batch:
        return self.model.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        features, carry = self.model(step["obs"], carry, step["is_first"])
        best = self.head(features).argmax(-1)
        if mode == "greedy":
            return {"action": best}, carry
        dice, other = self.ctx.rand(len(best)), self.ctx.randint(self.actions, len(best))
        return {"action": torch.where(dice < (1.0 if mode == "random" else self.cfg.epsilon), other, best)}, carry

    def states(self, batch: Batch, carry: Batch) -> tuple[Tensor, Batch]:
        """Unroll over all rows: features ``[T, B, F]``, and the states before every stride-th row, ``[n, B, ...]``."""
        stride, features, states = self.cfg.stride, [], []
        for start in range(0, len(batch["is_first"]), stride):
            states.append(carry)
            rows = slice(start, start + stride)
            out, carry = self.model(tree.take(batch["obs"], rows), carry, batch["is_first"][rows])
            features.append(out)
        return torch.cat(features), tree.map(lambda *x: torch.stack(x).detach(), *states)

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        burn_in = self.ctx.needs.window.burn_in
        features, states = self.states(batch, tree.take(batch["carry"], 0))
        q = self.head(features)[burn_in:]
        reward, terminated, valid = (batch[key][burn_in:] for key in ("reward", "terminated", "valid"))
        returns, discount, _ = n_step_rows(reward, terminated, valid, self.cfg.gamma, 1)
        target = returns + discount * q[1:].max(-1).values.detach()
        error = target - q[:-1].gather(-1, batch["action"][burn_in:-1, :, None]).squeeze(-1)
        learned = valid[:-1]
        term = nn.functional.pad(error.square() * learned, (0, 0, burn_in, 1))
        feedback = {"priority": sequence_priority(error.detach().abs(), learned, 0.9)}
        return Losses({"q": term}, feedback=feedback | ({"carry": states} if self.cfg.refresh else {}))


COMMON = "# @package _global_\ndefaults:\n  - override /buffer: {buffer}\n  - override /model: {model}\n"
CRITIC = "  gamma: 0.99\n  lr: 3.0e-3\n  vf_loss_coeff: {vf}\n  entropy_coeff: 0.01\n"
MONTE_CARLO = """num_envs: 4
rollout_fragment_length: 16
train_batch_size: 8
replay_ratio: null
algo:
  name: montecarlo
"""
REFRESHING = """num_envs: 2
rollout_fragment_length: 4
train_batch_size: 16
num_steps_sampled_before_learning_starts: 200
replay_ratio: 0.125
algo:
  name: refreshing
  gamma: 0.97
  lr: 1.0e-3
  length: 8
  burn_in: 4
  stride: 4
  epsilon: 0.2
  refresh: true
"""
MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.learners:"
    names = {"montecarlo": "MonteCarlo", "refreshing": "Refreshing"}
    return [Component("algo", name, module + cls) for name, cls in names.items()]

@hookimpl
def rlplug_conf():
    return "rlplug_learners"
"""
FILES = {
    "rlplug_learners/__init__.py": MANIFEST,
    "rlplug_learners/conf/algo/montecarlo.yaml": COMMON.format(buffer="episodes", model="mlp")
    + MONTE_CARLO
    + CRITIC.format(vf=0.5),
    "rlplug_learners/conf/algo/refreshing.yaml": COMMON.format(buffer="sequence", model="gru") + REFRESHING,
}

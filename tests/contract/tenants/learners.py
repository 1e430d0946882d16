"""An algorithm that lives on whole episodes, each of which it plays itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlplug import Algorithm, Context, EnvSpec, Losses, Needs, Optim
from rlplug.functional import reverse_scan
from rlplug.nn import Adam, Linear, head_for
from rlplug.settings import NonNegativeFloat, PositiveFloat, UnitFloat, option, settings
from rlplug.types import Batch, Mode


class MonteCarlo(Algorithm):
    """REINFORCE on whole episodes: returns are what was really earned, and nothing bootstraps."""

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
        dist = dist.uniform() if mode == "random" else dist
        noise = self.policy.noise(self.ctx, len(step["is_first"]))
        action = dist.mode() if mode == "greedy" else dist.sample(noise)
        return {"action": action, "logp": dist.logp(action)}, carry

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
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


CONF = """# @package _global_
defaults:
  - override /buffer: episodes
  - override /model: mlp
num_envs: 4
rollout_fragment_length: 16
train_batch_size: 8
replay_ratio: null
algo:
  name: montecarlo
  gamma: 0.99
  lr: 3.0e-3
  vf_loss_coeff: 0.5
  entropy_coeff: 0.01
"""
MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    return [Component("algo", "montecarlo", "tests.contract.tenants.learners:MonteCarlo")]

@hookimpl
def rlplug_conf():
    return "rlplug_learners"
"""
FILES = {"rlplug_learners/__init__.py": MANIFEST, "rlplug_learners/conf/algo/montecarlo.yaml": CONF}

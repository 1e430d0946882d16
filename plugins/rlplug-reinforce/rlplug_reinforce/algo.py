"""REINFORCE with a baseline, Williams 1992; Sutton & Barto 2018, section 13.4."""

import torch

from rlplug import Algorithm, Context, EnvSpec, Losses, Needs, Optim
from rlplug.functional import gae
from rlplug.nn import Linear, head_for
from rlplug.settings import NonNegativeFloat, Scheduled, UnitFloat, option, settings


class Reinforce(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        vf_loss_coeff: NonNegativeFloat = option("Weight of the baseline's loss.")
        entropy_coeff: NonNegativeFloat = option("Weight of the entropy bonus.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        return Needs(keys=("obs", "action", "value"))

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.sole
        self.model, self.value_model = ctx.build("model", group.obs), ctx.build("critic_model", group.obs)
        self.policy = head_for(group.action, self.model.out_dim)
        self.baseline = Linear(self.value_model.out_dim, 1)
        self.lr = ctx.schedule(cfg.lr)

    def optimizers(self):
        return {"policy": Optim(torch.optim.Adam(self.parameters(), lr=self.lr, fused=True), lr=self.lr)}

    def evaluate(self, obs):
        """Action distribution and baseline of every row."""
        (features, _), (of_value, _) = self.model(obs, {}, None), self.value_model(obs, {}, None)
        return self.policy(features), self.baseline(of_value).squeeze(-1)

    def act(self, step, carry, mode):
        dist, value = self.evaluate(step["obs"])
        action = dist.mode() if mode == "greedy" else dist.sample(self.policy.noise(self.ctx, len(value)))
        return {"action": action, "value": value}, carry

    def prepare(self, batch):
        """Reward-to-go: GAE with lambda 1, which bootstraps where a segment ends within an episode."""
        rows = (batch[key] for key in ("reward", "value", "terminated", "valid"))
        advantage, ret = gae(*rows, self.cfg.gamma, 1.0)
        return batch | {"advantage": advantage, "ret": ret}

    def forward(self, batch, parts):
        dist, value = self.evaluate(batch["obs"])
        return Losses(
            {
                "policy": -dist.logp(batch["action"]) * batch["advantage"],
                "value": self.cfg.vf_loss_coeff * (value - batch["ret"]).square(),
                "entropy": -self.cfg.entropy_coeff * dist.entropy(),
            }
        )

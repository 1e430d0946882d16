"""REINFORCE with a baseline, Williams 1992; Sutton & Barto 2018, section 13.4."""

import torch

from rlplug import Algorithm, Losses, Needs, NonNegativeFloat, Optim, Scheduled, UnitFloat, option, settings
from rlplug.functional import gae
from rlplug.nn import Linear, head_for


class Reinforce(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        vf_loss_coeff: NonNegativeFloat = option("Weight of the baseline's loss.")
        entropy_coeff: NonNegativeFloat = option("Weight of the entropy bonus.")

    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("obs", "action", "value"))

    def __init__(self, cfg, ctx):
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.model, self.value_model = (ctx.build(slot, ctx.spec.sole.obs) for slot in ("model", "critic_model"))
        self.policy = head_for(ctx.spec.sole.action, self.model.out_dim)
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
        advantage, ret = gae(*(batch[k] for k in ("reward", "value", "terminated", "valid")), self.cfg.gamma, 1.0)
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

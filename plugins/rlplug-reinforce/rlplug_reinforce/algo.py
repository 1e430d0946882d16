"""REINFORCE with a baseline, Williams 1992; Sutton & Barto 2018, section 13.4."""

from rlplug import Algorithm, Context, EnvSpec, Losses, Needs, Optim
from rlplug.functional import gae
from rlplug.nn import Adam, Linear, head_for
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
        return Needs(data="rollout", keys=("obs", "action", "action_mask"))

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        self.model, self.value_model = ctx.build("model", group.obs), ctx.build("critic_model", group.obs)
        self.policy = head_for(group.action, self.model.out_dim)
        self.baseline = Linear(self.value_model.out_dim, 1)
        self.lr = ctx.schedule(cfg.lr)

    def optimizers(self):
        return {"policy": Optim(Adam(self.parameters(), lr=self.lr), lr=self.lr)}

    def dist(self, rows):
        """Return the action distribution of every row; environments may mask actions."""
        return self.policy(self.model(rows["obs"], {}, None)[0], rows.get("action_mask"))

    def value(self, obs):
        """Return the baseline of every row."""
        return self.baseline(self.value_model(obs, {}, None)[0]).squeeze(-1)

    def act(self, step, carry, mode):
        dist = self.dist(step).uniform() if mode == "random" else self.dist(step)
        action = dist.mode() if mode == "greedy" else dist.sample(self.policy.noise(self.ctx, len(step["is_first"])))
        return {"action": action}, carry

    def prepare(self, batch):
        """Compute rewards-to-go: GAE with lambda 1, which bootstraps if a segment ends within an episode."""
        value, cfg = self.value(batch["obs"]), self.cfg
        advantage, ret = gae(batch["reward"], value, batch["terminated"], batch["valid"], cfg.gamma, lambda_=1.0)
        return batch | {"advantage": advantage, "returns": ret}

    def forward(self, batch, parts):
        dist = self.dist(batch)
        return Losses(
            {
                "policy": -dist.logp(batch["action"]) * batch["advantage"],
                "value": self.cfg.vf_loss_coeff * (self.value(batch["obs"]) - batch["returns"]).square(),
                "entropy": -self.cfg.entropy_coeff * dist.entropy(),
            }
        )

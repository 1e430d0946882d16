"""The cross-entropy method: de Boer et al. 2005 (doi:10.1007/s10479-005-5724-z), Mannor et al. 2003 (ICML).

With noise that vanishes: Szita & Lorincz 2006 (doi:10.1162/neco.2006.18.12.2936).
"""

import math

import torch
from gymnasium.spaces import Box, Discrete
from rlplug import Algorithm, ConfigError, Context, EnvSpec, Losses, Needs
from rlplug.functional import greedy
from rlplug.nn import Flatten
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings


class Cem(Algorithm):
    """Draws the weights of a linear policy anew for every episode, from a normal distribution for each of them.

    Of the episodes of a generation the elite, those of the highest return, say what the next mean and deviation are.
    Nothing is differentiated: there is no `forward` and no optimizer. What is learned are two buffers.
    """

    # Every option: type, range, and what it does. The defaults stand in conf/algo/cem.yaml.
    @settings
    class Config:
        elite_share: UnitFloat = option("Share of a generation's episodes that the next one follows; at least two.")
        initial_std: PositiveFloat = option("Standard deviation of every weight at the start.")
        extra_std: Scheduled[NonNegativeFloat] = option("Deviation that is added to that of the elite.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        """Whole episodes, each once, with the weights that played them. Observations need not be stored."""
        action = spec.single_agent.action
        if not isinstance(action, Discrete | Box):
            raise ConfigError("algo", f"cem cannot choose actions of {action}; it serves Discrete and Box")
        return Needs(data="episodes", keys=("action", "theta"))

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        self.flatten, self.space = Flatten(group.obs), group.action  # any observation as one vector
        self.outputs = int(self.space.n) if isinstance(self.space, Discrete) else math.prod(self.space.shape)
        size = (self.flatten.size + 1) * self.outputs
        self.extra_std = ctx.schedule(cfg.extra_std)  # a 0-d tensor, which follows the schedule
        self.register_buffer("mean", torch.zeros(size))  # buffers are kept in checkpoints, and sent to actors
        self.register_buffer("std", torch.full((size,), cfg.initial_std))

    def initial_carry(self, n):
        """What acting remembers from row to row: the weights of the episode that is being played, `[n, size]`."""
        return {"theta": self.mean.new_zeros(n, len(self.mean))}

    def act(self, step, carry, mode):
        """Actions for one row of every environment, `[B, ...]`, each by weights of its own."""
        first = step["is_first"]
        if mode == "greedy":
            theta = self.mean.expand(len(first), -1)
        else:  # all randomness comes from `ctx`; what is drawn for episodes that go on is not used
            drawn = self.mean + self.std * self.ctx.randn(len(first), len(self.mean))
            theta = torch.where(first[:, None], drawn, carry["theta"])
        x = self.flatten(step["obs"])
        weight = theta.view(len(first), -1, self.outputs)
        out = torch.einsum("bi,bio->bo", x, weight[:, :-1]) + weight[:, -1]
        discrete = isinstance(self.space, Discrete)
        action = greedy(out, step.get("action_mask")) if discrete else out.tanh().view(-1, *self.space.shape)
        return {"action": action, "theta": theta}, {"theta": theta}

    def update(self, batch, learner):
        """From a generation of episodes side by side, `[L+1, N]`, to the next mean and deviation."""
        returns = torch.where(batch["valid"], batch["reward"], 0.0).sum(0)
        found = torch.cat((returns[:, None], batch["theta"][0]), 1)
        if len(self.ctx.env_ids) < self.ctx.num_envs:  # other processes played the rest
            found = learner.gather(found)
        best = found[found[:, 0].argsort(descending=True, stable=True)][: self.elites(len(found)), 1:]
        self.mean.copy_(best.mean(0))
        self.std.copy_((best.var(0, correction=0) + self.extra_std.square()).sqrt())
        return Losses({}, {"return": found[:, 0].mean(), "std": self.std.mean()})

    def elites(self, episodes):
        """How many of a generation's episodes are its elite."""
        return min(episodes, max(2, round(self.cfg.elite_share * episodes)))

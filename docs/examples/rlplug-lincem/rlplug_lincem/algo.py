"""The cross-entropy method: de Boer et al. 2005 (doi:10.1007/s10479-005-5724-z), Mannor et al. 2003 (ICML).

With decaying noise: Szita & Lorincz 2006 (doi:10.1162/neco.2006.18.12.2936).
"""

import math

import torch
from gymnasium.spaces import Box, Discrete
from rlplug import Algorithm, ConfigError, Context, EnvSpec, Losses, Needs
from rlplug.functional import greedy
from rlplug.nn import Flatten
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings


class Cem(Algorithm):
    """Draws the weights of a linear policy for every episode, each from a normal distribution.

    The elite of a generation, the episodes with the highest returns, determines the next mean and standard deviation.
    Nothing is differentiated: there is no `forward` and no optimizer. The learned state is two buffers.
    """

    # Every option: type, range, and what it does. The defaults are in conf/algo/lincem.yaml.
    @settings
    class Config:
        elite_share: UnitFloat = option("Fraction of a generation's episodes that are its elite; at least two.")
        initial_std: PositiveFloat = option("Initial standard deviation of every weight.")
        extra_std: Scheduled[NonNegativeFloat] = option("Standard deviation added to that of the elite.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        """Request whole episodes, each once, with the weights that collected them. Observations are not stored."""
        action = spec.single_agent.action
        if not isinstance(action, Discrete | Box):
            raise ConfigError("algo", f"lincem cannot choose actions of {action}; it serves Discrete and Box")
        return Needs(data="episodes", keys=("action", "theta"))

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        self.flatten, self.space = Flatten(group.obs), group.action  # any observation as one vector
        self.outputs = int(self.space.n) if isinstance(self.space, Discrete) else math.prod(self.space.shape)
        size = (self.flatten.size + 1) * self.outputs
        self.extra_std = ctx.schedule(cfg.extra_std)  # a 0-d tensor that follows the schedule
        self.register_buffer("mean", torch.zeros(size))  # buffers are saved in checkpoints and sent to actors
        self.register_buffer("std", torch.full((size,), cfg.initial_std))

    def initial_carry(self, n):
        """Return the state of acting between rows: the weights of the current episode, `[n, size]`."""
        return {"theta": self.mean.new_zeros(n, len(self.mean))}

    def act(self, step, carry, mode):
        """Return actions for one row of every environment, `[B, ...]`, each from its own weights."""
        first, n = step["is_first"], step["is_first"].shape[0]
        if mode == "greedy":
            theta = self.mean.expand(n, -1)
        else:  # all randomness comes from `ctx`; draws for unfinished episodes are not used
            drawn = self.mean + self.std * self.ctx.randn(n, len(self.mean))
            theta = torch.where(first[:, None], drawn, carry["theta"])
        x = self.flatten(step["obs"])
        weight = theta.view(n, -1, self.outputs)
        out = torch.einsum("bi,bio->bo", x, weight[:, :-1]) + weight[:, -1]
        if mode == "random":  # uniform after tanh, and so is the place of the largest
            out = (2.0 * self.ctx.rand(*out.shape) - 1.0).atanh()
        discrete = isinstance(self.space, Discrete)
        action = greedy(out, step.get("action_mask")) if discrete else out.tanh().view(-1, *self.space.shape)
        return {"action": action, "theta": theta}, {"theta": theta}

    def update(self, batch, learner):
        """Compute the next mean and standard deviation from a generation of episodes, `[L+1, N]`."""
        returns = torch.where(batch["valid"], batch["reward"], 0.0).sum(0)
        found = torch.cat((returns[:, None], batch["theta"][0]), 1)
        if len(self.ctx.env_ids) < self.ctx.num_envs:  # other processes collected the rest
            found = learner.gather(found)
        best = found[found[:, 0].argsort(descending=True, stable=True)][: self.elites(len(found)), 1:]
        self.mean.copy_(best.mean(0))
        self.std.copy_((best.var(0, correction=0) + self.extra_std.square()).sqrt())
        return Losses({}, {"return": found[:, 0].mean(), "std": self.std.mean()})

    def elites(self, episodes):
        """Return how many of a generation's episodes are its elite."""
        return min(episodes, max(2, round(self.cfg.elite_share * episodes)))

"""The cross-entropy method: de Boer et al. 2005 (doi:10.1007/s10479-005-5724-z), Mannor et al. 2003 (ICML).

With decaying noise: Szita & Lorincz 2006 (doi:10.1162/neco.2006.18.12.2936). A candidate is a seed, from which
its noise is drawn where it is needed.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from rlplug.api import Algorithm, Context, Learner, Losses, Needs
from rlplug.functional.evolution import elite
from rlplug.nn.direct import Candidates, DirectPolicy, noise_of, require_memory
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class CEM(Algorithm):
    """Draws every candidate from a normal distribution of the weights, and fits it to the best ones.

    The parameters are the mean, with which ``act`` plays otherwise; the buffers ``std_...`` are the deviations.
    """

    traceable = True

    @settings
    class Config:
        population: Candidates = option("Candidates of a generation.")
        elite_share: UnitFloat = option("Fraction of the candidates that are the elite; at least two.")
        initial_std: PositiveFloat = option("Initial standard deviation of every weight.")
        extra_std: Scheduled[NonNegativeFloat] = option(
            "Standard deviation whose square is added to the variance of the elite."
        )
        zero_init: bool = option("Begin with zeros in the last layer.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(action := spec.single_agent.action, Discrete | Box):
            raise ConfigError("algo", f"cem cannot choose actions of {action}; use algo=ppo for these")
        if cfg.population < 2:
            raise ConfigError("algo.population", "1 candidate has no elite; use 2 or more")
        return Needs(rewards=False, keys=("action_mask",) if spec.has_masks else ())

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.policy = DirectPolicy(ctx.build("model", group.obs), group.action, cfg.zero_init).requires_grad_(False)
        elites = max(2, round(cfg.elite_share * cfg.population))
        require_memory(self.policy, elites, "algo.population", "elite candidates")
        self.extra_std = ctx.schedule(cfg.extra_std)
        for name, w in self.policy.named_parameters():
            self.register_buffer(self._std(name), torch.full_like(w, cfg.initial_std))

    @staticmethod
    def _std(name: str) -> str:
        return f"std_{name.removeprefix('policy.').replace('.', '_')}"

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.policy.act(step, carry, mode, self.ctx)

    def ask(self) -> Batch:
        """Return the seed of every candidate, ``[P]``."""
        return {"seed": self.ctx.randint(2**62, self.cfg.population, rows=False)}

    def candidate_weights(self, candidate: Batch) -> Weights:
        return self.drawn(int(candidate["seed"]))

    def drawn(self, seed: int) -> Weights:
        """Return the weights of the candidate of a seed."""
        mean = dict(self.named_parameters())
        noise = noise_of(seed, mean)
        return {name: w + self.get_buffer(self._std(name)) * noise[name] for name, w in mean.items()}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Fit mean and deviation to the elite, from ``seed`` and ``return`` ``[P]``."""
        returns: Tensor = batch["return"]
        best = elite(returns, max(2, round(self.cfg.elite_share * len(returns))))
        drawn = [self.drawn(seed) for seed in batch["seed"][best].tolist()]
        with torch.no_grad():
            for name, mean in self.named_parameters():
                own = torch.stack([weights[name] for weights in drawn])
                mean.copy_(own.mean(0))
                self.get_buffer(self._std(name)).copy_((own.var(0, correction=0) + self.extra_std.square()).sqrt())
        std = torch.cat([x.flatten() for x in self.buffers()]).mean()
        return Losses({}, {"return": returns.mean(), "return_max": returns.max(), "std": std})

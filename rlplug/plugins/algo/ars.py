"""Augmented Random Search, Mania et al. 2018 (arXiv:1803.07055): simple random search of policies.

A candidate is a seed and a sign. Its noise is drawn from the seed where it is needed, and is never sent.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Box, Discrete

from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Optim
from rlplug.functional.evolution import ars_weights
from rlplug.nn.direct import Candidates, DirectPolicy, noise_of
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class ARS(Algorithm):
    """Moves along the best random directions, each weighted by the difference of the returns at its two ends.

    ``model.hidden=[]`` is a linear policy. With ``preprocess.normalize_obs`` it is version 2 of the paper (V2-t if
    ``rollouts_used`` is below ``num_rollouts``), else version 1.
    """

    traceable = True

    @settings
    class Config:
        num_rollouts: Candidates = option("Directions of an update; each has two candidates.")
        rollouts_used: PositiveInt = option("Best directions that make the step, by the higher of their two returns.")
        noise_stdev: PositiveFloat = option("Standard deviation of the noise on the weights.")
        sgd_stepsize: Scheduled[NonNegativeFloat] = option("Step size.")
        offset: NonNegativeFloat = option("Reward shift: subtracted from every reward, such as a bonus for survival.")
        zero_init: bool = option("Begin with zeros in the last layer, as the paper does.")
        eval_prob: UnitFloat = option("Expected evaluations of the unperturbed weights per candidate.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(action := spec.single_agent.action, Discrete | Box):
            raise ConfigError("algo", f"ars cannot choose actions of {action}; use algo=ppo for these")
        if cfg.rollouts_used > cfg.num_rollouts:
            said = f"{cfg.rollouts_used} of num_rollouts={cfg.num_rollouts} directions; use that many or fewer"
            raise ConfigError("algo.rollouts_used", said)
        return Needs(rewards=False, keys=("action_mask",) if spec.has_masks else ())

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.policy = DirectPolicy(ctx.build("model", group.obs), group.action, cfg.zero_init)
        self.lr = ctx.schedule(cfg.sgd_stepsize)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.policy.act(step, carry, mode, self.ctx)

    def ask(self) -> Batch:
        """Return seeds and signs ``[P]``; a sign of 0 is an evaluation of the unperturbed weights."""
        seed = self.ctx.randint(2**62, self.cfg.num_rollouts, rows=False)
        evaluated = int((self.ctx.rand(2 * self.cfg.num_rollouts, rows=False) < self.cfg.eval_prob).sum())
        zeros, ones = seed.new_zeros(evaluated), torch.ones_like(seed)
        return {"seed": torch.cat([seed, seed, zeros]), "sign": torch.cat([ones, -ones, zeros])}

    def candidate_weights(self, candidate: Batch) -> Weights:
        weights = dict(self.named_parameters())
        if not (sign := int(candidate["sign"])):
            return {**weights}
        noise, scale = noise_of(int(candidate["seed"]), weights), self.cfg.noise_stdev * sign
        return {name: w + scale * noise[name] for name, w in weights.items()}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Make a step of algorithm 2, from ``seed``, ``sign``, ``return`` and ``length`` ``[P]``."""
        returns = batch["return"] - self.cfg.offset * batch["length"]
        above, below = batch["sign"] > 0, batch["sign"] < 0
        best, scales = ars_weights(returns[above], returns[below], self.cfg.rollouts_used)
        weights = dict(self.named_parameters())
        grads: Weights = {name: torch.zeros_like(w) for name, w in weights.items()}
        for seed, scale in zip(batch["seed"][above][best].tolist(), scales.tolist(), strict=True):
            for name, noise in noise_of(seed, weights).items():
                grads[name].sub_(noise, alpha=scale)
        learner.apply(grads, self)
        own = batch["return"][above | below]
        metrics = {"return": own.mean(), "return_max": own.max(), "length": batch["length"][above | below].mean()}
        if (batch["sign"] == 0).any():
            metrics["return_unperturbed"] = batch["return"][batch["sign"] == 0].mean()
        return Losses({}, metrics)

    def optimizers(self) -> dict[str, Optim]:
        return {"policy": Optim(torch.optim.SGD(self.policy.parameters(), lr=float(self.lr)), lr=self.lr)}

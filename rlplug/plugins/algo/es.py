"""Evolution Strategies as a Scalable Alternative to Reinforcement Learning, Salimans et al. 2017 (arXiv:1703.03864).

A candidate is a seed and a sign. Its noise is drawn from the seed where it is needed, and is never sent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from gymnasium.spaces import Box, Discrete
from pydantic import Field

from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Optim
from rlplug.functional.evolution import centered_ranks, mirrored_gradient
from rlplug.nn.direct import Candidates, DirectPolicy, noise_of
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class ES(Algorithm):
    """Follows the gradient of the expected return under noise on the weights, with mirrored noise.

    ``act`` is deterministic. The update of a generation depends on seeds, signs and returns only.
    """

    traceable = True

    @settings
    class Config:
        episodes_per_batch: Candidates = option("Candidates of a generation: mirrored pairs, so an even number.")
        noise_stdev: PositiveFloat = option("Standard deviation of the noise on the weights.")
        stepsize: Scheduled[NonNegativeFloat] = option("Learning rate of the optimizer.")
        optimizer: Literal["adam", "sgd"] = option("adam, or sgd with the momentum.")
        momentum: Annotated[float, Field(ge=0, lt=1)] = option("Momentum of sgd; adam ignores it.")
        l2_coeff: NonNegativeFloat = option("Weight decay: this times the weights is added to the gradient.")
        return_proc_mode: Literal["centered_rank", "raw"] = option(
            "Fitness: centered ranks of the returns, or returns."
        )
        eval_prob: UnitFloat = option("Expected evaluations of the unperturbed weights per candidate.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(action := spec.single_agent.action, Discrete | Box):
            raise ConfigError("algo", f"es cannot choose actions of {action}; use algo=ppo for these")
        if cfg.episodes_per_batch % 2:
            said = f"{cfg.episodes_per_batch} candidates are no mirrored pairs; use {cfg.episodes_per_batch + 1}"
            raise ConfigError("algo.episodes_per_batch", said)
        return Needs(rewards=False, keys=("action_mask",) if spec.has_masks else ())

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.policy = DirectPolicy(ctx.build("model", group.obs), group.action)
        self.lr = ctx.schedule(cfg.stepsize)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.policy.act(step, carry, mode, self.ctx)

    def ask(self) -> Batch:
        """Return seeds and signs ``[P]``; a sign of 0 is an evaluation of the unperturbed weights."""
        seed = self.ctx.randint(2**62, self.cfg.episodes_per_batch // 2, rows=False)
        evaluated = int((self.ctx.rand(self.cfg.episodes_per_batch, rows=False) < self.cfg.eval_prob).sum())
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
        played, returns = batch["sign"] != 0, batch["return"].to(torch.float64)
        own = returns[played]
        fitness = centered_ranks(own) if self.cfg.return_proc_mode == "centered_rank" else own
        above = batch["sign"][played] > 0  # several batches of candidates: the pairs of each are in one order
        scales = mirrored_gradient(fitness[above], fitness[~above], self.cfg.noise_stdev).tolist()
        weights = dict(self.named_parameters())
        grads: Weights = {name: self.cfg.l2_coeff * w.detach() for name, w in weights.items()}
        for seed, scale in zip(batch["seed"][played][above].tolist(), scales, strict=True):
            for name, noise in noise_of(seed, weights).items():
                grads[name].sub_(noise, alpha=scale)
        learner.apply(grads, self)
        metrics = {"return": own.mean(), "return_max": own.max(), "length": batch["length"][played].mean()}
        if len(evaluated := returns[~played]):
            metrics["return_unperturbed"] = evaluated.mean()
        return Losses({}, metrics)

    def optimizers(self) -> dict[str, Optim]:
        kinds: dict[str, Any] = {"adam": {}, "sgd": {"momentum": self.cfg.momentum}}
        cls = torch.optim.Adam if self.cfg.optimizer == "adam" else torch.optim.SGD
        optimizer = cls(self.policy.parameters(), lr=float(self.lr), **kinds[self.cfg.optimizer])
        return {"policy": Optim(optimizer, lr=self.lr)}

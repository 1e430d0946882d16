"""Parameter space noise, Plappert et al. 2018 (arXiv:1706.01905)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from rlplug.api import Context, Exploration, Learner, Losses, Segment
from rlplug.settings import AtLeastOne, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, Weights


class ParameterNoise(Exploration):
    """Acts with weights ``w + sigma N(0, 1)``, and adapts ``sigma`` to the change of the actions.

    Weight matrices and kernels are perturbed; biases, normalization layers and single parameters are not. The same
    noise acts in all environments of a run.
    """

    traceable = True
    sigma: Tensor
    seed: Tensor
    rounds: Tensor
    excess: Tensor

    @settings
    class Config:
        initial_sigma: PositiveFloat = option("Initial standard deviation of the noise.")
        delta: Scheduled[UnitFloat] = option(
            "Target distance to the noiseless policy: standard deviation of continuous actions in [-1, 1];"
            " epsilon of the epsilon-greedy policy at the same distance in values; else the fraction of"
            " actions that differ."
        )
        adaptation: AtLeastOne = option("Factor by which sigma changes after every round, the paper's alpha.")
        resample_every: PositiveInt = option("Rounds of collection with the same noise.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.delta = ctx.schedule(cfg.delta)
        self.register_buffer("sigma", torch.tensor(cfg.initial_sigma))
        self.register_buffer("seed", torch.zeros((), dtype=torch.long))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.long))
        self.register_buffer("excess", torch.tensor(torch.nan))  # distance minus its target; NaN: not measured

    def perturb_weights(self, w: Weights) -> Weights:
        if self.rounds % self.cfg.resample_every == 0:
            self.seed.copy_(self.ctx.randint(2**62, 1, rows=False)[0])
        self.rounds += 1
        draw = torch.Generator(self.sigma.device).manual_seed(int(self.seed))  # only the seed is stored

        def noisy(p: Tensor) -> Tensor:
            return p + self.sigma * torch.randn(p.shape, generator=draw, device=p.device)

        return {name: noisy(p) if _is_perturbed(name, p) else p for name, p in w.items()}

    def adapt_noise(self, plain: Batch, noisy: Batch) -> None:
        distance, aim = policy_distance(plain, noisy, self.delta)
        self.excess.copy_(distance - aim)

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Apply equation 2: increase ``sigma`` while the distance, over all ranks that acted, is below its target."""
        measured = ~self.excess.isnan()
        if learner.reduce(measured.float(), "max"):
            excess = learner.reduce(self.excess, "mean", measured)
            self.sigma *= self.cfg.adaptation if excess <= 0.0 else 1.0 / self.cfg.adaptation
        self.excess.fill_(torch.nan)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        return Losses({}, {"sigma": self.sigma.clone()})


def policy_distance(plain: Batch, noisy: Batch, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of two greedy policies on the same rows, and its target (appendix C). Both are means over
    rows: those of several actors or ranks can be averaged.

    Values ``q``: the KL divergence of ``softmax(q)``; its target is that of an epsilon-greedy policy, ``-log(1 - delta
    + delta / n)`` for ``n`` allowed actions. Continuous actions: their mean squared difference; its target is
    ``delta`` squared. Other actions: the fraction of their parts that differ; its target is ``delta``.
    """
    action = plain["action"]
    if "q" in plain:
        log_p, log_q = (log_softmax(x["q"], -1) for x in (plain, noisy))
        p = log_p.exp()
        distance = torch.where(p > 0.0, p * (log_p - log_q), 0.0).sum(-1).mean()
        allowed = (plain["q"] > torch.finfo(plain["q"].dtype).min).sum(-1)
        return distance, -(1.0 - delta + delta / allowed).log().mean()
    difference = action - noisy["action"]
    if difference.is_floating_point():
        return difference.square().mean(), delta.square()
    return (difference != 0).float().mean(), delta


def _is_perturbed(name: str, p: Tensor) -> bool:
    return p.ndim > 1 and "bias" not in name and "norm" not in name

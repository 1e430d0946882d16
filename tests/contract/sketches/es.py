# pyright: strict
"""Evolution Strategies as a Scalable Alternative to Reinforcement Learning, Salimans et al. 2017 (arXiv:1703.03864).

Loop ``population``: every rank asks for the same candidates, plays its share, and updates from all results.
A candidate is a seed and a sign; the noise is made from it wherever it is needed, and never travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim, Run
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class Population(Protocol):
    """Candidate for api: what the loop ``population`` asks of an algorithm beyond ``Algorithm``."""

    def ask(self) -> Batch:
        """Candidates, leaves ``[P]``; the same on every rank."""
        ...

    def weights(self, candidate: Batch) -> Weights:
        """On the actor: the weights that one candidate (0-d leaves) plays with."""
        ...


class ES(Algorithm):
    @settings
    class Config:
        pairs: PositiveInt = option("Mirrored pairs of candidates in a generation.")
        sigma: PositiveFloat = option("Standard deviation of the noise on the parameters.")
        weight_decay: PositiveFloat = option("L2 penalty on the parameters.")
        lr: PositiveFloat = option("Adam's step size.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        self.torso: Model = ctx.build("model", group.obs)
        self.head = nn.Linear(self.torso.out_dim, int(group.action.n))

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(spec.single_agent.action, Discrete):
            raise ConfigError("algo.name", "this es needs discrete actions")
        return Needs(data="episodes", keys=("return", "length", "seed", "sign"))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        features, carry = self.torso(step["obs"], carry, step["is_first"])
        return {"action": self.head(features).argmax(-1)}, carry

    def postprocess(self, data: Batch) -> Batch:
        """Of whole episodes ``[L+1, B]`` four numbers each leave the actor, ``[B]``."""
        valid, candidate = data["valid"], data["task"]
        return {"return": (data["reward"] * valid).sum(0), "length": valid.sum(0)} | candidate

    def noise(self, seed: int) -> Weights:
        """Standard normal, in the shape of the parameters; a function of the seed alone."""
        source = torch.Generator().manual_seed(seed)
        return {name: torch.randn(p.shape, generator=source).to(p.device) for name, p in self.named_parameters()}

    def ask(self) -> Batch:
        seed = self.ctx.randint(2**62, self.cfg.pairs, rows=False)
        return {"seed": torch.cat([seed, seed]), "sign": torch.cat([torch.ones_like(seed), -torch.ones_like(seed)])}

    def weights(self, candidate: Batch) -> Weights:
        noise, scale = self.noise(int(candidate["seed"])), self.cfg.sigma * candidate["sign"]
        return {name: p.detach() + scale * noise[name] for name, p in self.named_parameters()}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        seeds, signs, returns = (learner.gather(batch[key]) for key in ("seed", "sign", "return"))
        steps = signs * centred_ranks(returns) / (len(returns) * self.cfg.sigma)
        grads = {name: self.cfg.weight_decay * p.detach() for name, p in self.named_parameters()}
        for seed, step in zip(seeds, steps, strict=True):
            for name, eps in self.noise(int(seed)).items():
                grads[name] -= step * eps
        learner.apply(grads, self)
        return Losses({}, {"return": returns.mean()})

    def optimizers(self) -> dict[str, Optim]:
        return {"center": Optim(torch.optim.Adam(self.parameters(), lr=self.cfg.lr))}


def centred_ranks(x: Tensor) -> Tensor:
    """-0.5 for the lowest to 0.5 for the highest."""
    return x.argsort().argsort().float() / (len(x) - 1) - 0.5


def generation(run: Run, algorithm: ES, rows: int) -> Losses:
    """One step of the loop ``population``; an actor calls ``algorithm.weights`` for each of its tasks."""
    results = [*run.collector.collect(rows, tasks=algorithm.ask())]
    return run.update({key: torch.cat([r[key] for r in results]) for key in results[0]})


PROTOCOLS: Sequence[type[Population]] = (ES,)  # pyright checks that ES is one

# pyright: strict
"""Evolution Strategies as a Scalable Alternative to Reinforcement Learning, Salimans et al. 2017 (arXiv:1703.03864).

A candidate is a seed and a sign: the noise is made from it wherever it is needed, and never travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from rlplug import tree
from rlplug.api import Algorithm, Context, Job, Learner, Loop, Losses, Model, Needs, Optim, Run
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class Asks(Protocol):
    """What the loop wants of an algorithm beyond ``Algorithm``."""

    def ask(self) -> Batch:
        """Return candidates, leaves ``[P]``, the same on every rank."""
        ...


class Population(Loop):
    """Asks for candidates, lets each play an episode, and tells the algorithm the returns."""

    gives_rows = False

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        pass

    def updates(self, env_steps: int) -> int:
        return 0  # an update follows a generation, however many steps it has

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            candidates = cast(Asks, run.algorithm).ask()
            size: int = len(next(tree.leaves(candidates)))
            first = run.progress.updates * size
            jobs = [Job(first + i, candidate=tree.take(candidates, i), mode="greedy", keys=()) for i in range(size)]
            returns = torch.empty(size, dtype=torch.float64)
            for job, episode in run.play(jobs):
                returns[job.number - first] = episode["return"].mean()
            run.update(candidates | {"return": returns})


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
        return Needs(rewards=False)  # of rows: it knows returns

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        features, carry = self.torso(step["obs"], carry, step["is_first"])
        return {"action": self.head(features).argmax(-1)}, carry

    def ask(self) -> Batch:
        seed = self.ctx.randint(2**62, self.cfg.pairs, rows=False)
        return {"seed": torch.cat([seed, seed]), "sign": torch.cat([torch.ones_like(seed), -torch.ones_like(seed)])}

    def candidate_weights(self, candidate: Batch) -> Weights:
        noise, scale = self.noise(int(candidate["seed"])), self.cfg.sigma * int(candidate["sign"])
        return {name: p + scale * noise[name] for name, p in self.named_parameters()}

    def noise(self, seed: int) -> Weights:
        """Draw standard normal noise in the shape of the parameters; it is a function of the seed alone."""
        source = torch.Generator().manual_seed(seed)
        return {name: torch.randn(p.shape, generator=source).to(p.device) for name, p in self.named_parameters()}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Algorithm 2, with ranks for returns (section 2.1)."""
        steps = batch["sign"] * centered_ranks(batch["return"]) / (len(batch["return"]) * self.cfg.sigma)
        grads: Weights = {name: self.cfg.weight_decay * p.detach() for name, p in self.named_parameters()}
        for seed, step in zip(batch["seed"], steps, strict=True):
            for name, noise in self.noise(int(seed)).items():
                grads[name] -= float(step) * noise
        learner.apply(grads, self)
        return Losses({}, {"return": batch["return"].mean()})

    def optimizers(self) -> dict[str, Optim]:
        return {"center": Optim(torch.optim.Adam(self.parameters(), lr=self.cfg.lr))}


def centered_ranks(x: Tensor) -> Tensor:
    """Return -0.5 for the lowest to 0.5 for the highest."""
    return x.argsort().argsort().float() / (len(x) - 1) - 0.5


PROTOCOLS: Sequence[type[Asks]] = (ES,)  # pyright checks that ES is one
MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.population:"
    loop = Component("loop", "generations", module + "Population", ("algo=gaussian_es",))
    return [Component("algo", "gaussian_es", module + "ES"), loop]

@hookimpl
def rlplug_conf():
    return "rlplug_es"
"""
CONF = """# @package _global_
defaults:
  - override /model: mlp
  - override /loop: generations

algo:
  name: gaussian_es
  pairs: 16
  sigma: 0.1
  weight_decay: 1.0e-4
  lr: 0.05
"""
FILES = {
    "rlplug_es/__init__.py": MANIFEST,
    "rlplug_es/conf/loop/generations.yaml": "name: generations\n",
    "rlplug_es/conf/algo/gaussian_es.yaml": CONF,
}

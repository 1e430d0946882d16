"""What acts: the learner trains it, and every actor has a copy of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rlplug.api import Algorithm, Exploration, VecEnv
from rlplug.collection.collector import make_collector
from rlplug.collection.in_process import InProcessCollector
from rlplug.config import RunConfig
from rlplug.context import EnvShard, RunContext
from rlplug.distributed.rng import seed_global
from rlplug.trainer.normalize import Normalizer
from rlplug.types import Tree

TRAINING = 1
"""tells the seeds of training's environments from those of evaluation's"""


class Policy:
    """Algorithm, exploration and normalizer of a run, and the environments that they play.

    Args:
        acts_only: leave out exploration modules that only give rewards, which the learner alone needs.
    """

    def __init__(self, config: RunConfig, ctx: RunContext, acts_only: bool = False) -> None:
        seed_global(config.seed)
        self.config, self.ctx = config, ctx
        self.algorithm: Algorithm = config.algo.build(ctx).to(ctx.device)
        self.exploration: dict[str, Exploration] = {
            name: chosen.build(ctx).to(ctx.device)
            for name, chosen in config.exploration.items()
            if not acts_only or changes_actions(chosen.cls)
        }
        self.normalizer: Normalizer = Normalizer(config.preprocess, ctx.spec, len(ctx.env_ids)).to(ctx.device)
        self.normalize = self.normalizer if self.normalizer.obs else None

    def env(self, shard: EnvShard, render: bool = False) -> VecEnv:
        """Make environments."""
        return self.config.env.build(self.ctx.derive(shard=shard, render=render))

    def collector(self, env_ids: Sequence[int]) -> InProcessCollector:
        """Make a collector that plays some of the training's environments in this process."""
        total = self.config.num_envs
        seeds = np.random.SeedSequence([self.config.seed, TRAINING]).generate_state(total)
        shard = EnvShard("actor", total, env_ids)
        own = [int(seeds[i]) for i in env_ids]
        return make_collector(
            self.env(shard), self.algorithm, self.ctx, shard, own, self.exploration, normalize=self.normalize
        )

    # ---- state ----------------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Return the weights of everything, as checkpoints hold them."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "exploration": {name: extra.state_dict() for name, extra in self.exploration.items()},
            "normalizer": self.normalizer.state_dict(),
        }

    def load(self, state: Tree) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        for name, extra in self.exploration.items():
            extra.load_state_dict(state["exploration"][name])
        self.normalizer.load_state_dict(state["normalizer"])

    # ---- remote copies --------------------------------------------------------------------------------------------

    def acting_weights(self) -> dict[str, np.ndarray]:
        """Return what the algorithm acts with, which changes with every update."""
        keys, state = self.algorithm.actor_keys(), self.algorithm.state_dict()
        return {key: state[key].detach().cpu().numpy() for key in keys}

    def load_acting_weights(self, weights: dict[str, np.ndarray]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shared memory is read-only: it is copied
            tensors = {key: torch.from_numpy(value) for key, value in weights.items()}
        self.algorithm.load_state_dict(tensors, strict=False)

    def statistics(self) -> Tree:
        """Return the small rest that acting depends on: running moments, the state of exploration, schedules."""
        acting = {name: x for name, x in self.exploration.items() if changes_actions(type(x))}
        return {
            "normalizer": _host(self.normalizer.obs.state_dict()),
            "exploration": {name: _host(extra.state_dict()) for name, extra in acting.items()},
            "step": self.ctx.schedules.step,
        }

    def load_statistics(self, statistics: Tree) -> None:
        self.normalizer.obs.load_state_dict(statistics["normalizer"])
        for name, state in statistics["exploration"].items():
            self.exploration[name].load_state_dict(state)
        self.ctx.schedules.refresh(statistics["step"])

    def changed_exploration(self, statistics: Tree) -> Tree:
        """Return what acting changed in this copy's exploration modules since ``load_statistics(statistics)``."""
        told = statistics["exploration"]
        return {
            name: {key: now for key, now in _host(extra.state_dict()).items() if not torch.equal(now, told[name][key])}
            for name, extra in self.exploration.items()
        }

    def merge_exploration(self, actors: Sequence[Tree]) -> None:
        """Take over what acting changed in the exploration modules of remote copies, as the mean over them.

        Each of them played other environments. What acting did not change stays as the learner has it, which may have
        moved it meanwhile.

        Args:
            actors: their states; ``exploration`` in each is what ``changed_exploration`` returned.
        """
        for name in actors[0]["exploration"]:
            own = _host(self.exploration[name].state_dict())
            states = [own | actor["exploration"][name] for actor in actors]
            self.exploration[name].load_state_dict({key: _mean([s[key] for s in states]) for key in own})


def changes_actions(extra: type[Exploration]) -> bool:
    """Return whether such modules change what is done, and not only what is rewarded."""
    return any(getattr(extra, what) is not getattr(Exploration, what) for what in ("perturb", "perturb_weights"))


def _host(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}


def _mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean ``[...]``; where all are equal, that very number, as the sum of three may be rounded."""
    first, *others = values
    if not others or not first.is_floating_point():
        return first
    every = torch.stack([first, *others])
    return torch.where((every == first).all(0), first, every.mean(0))

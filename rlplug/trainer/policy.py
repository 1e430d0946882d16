"""The policy, trained by the learner and copied by every actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.agents import changes_actions, exploration_of
from rlplug.api import Algorithm, Curriculum, Exploration, VecEnv
from rlplug.collection.finishing import Transform, transforms
from rlplug.collection.play import Player
from rlplug.collection.shard import ShardCollector
from rlplug.collection.stepping import make_shard
from rlplug.config import RunConfig
from rlplug.context import EnvShard, RunContext
from rlplug.distributed.rng import seed_global
from rlplug.trainer.normalize import Normalizer
from rlplug.trainer.optimizer import refuse_nan
from rlplug.types import Tree

TRAINING, JOBS = 1, 3  # separate the seeds of training, its jobs and evaluation


class BehaviorPolicy:
    """Algorithm, exploration modules and normalizer of a run, which create its environments.

    Args:
        acts_only: leave out exploration modules that only change rewards; only the learner needs them.
    """

    def __init__(self, config: RunConfig, ctx: RunContext, acts_only: bool = False) -> None:
        seed_global(config.seed)
        self.config, self.ctx = config, ctx
        self.algorithm: Algorithm = config.algo.build(ctx).to(ctx.device)
        self.exploration: dict[str, Exploration] = {
            name: exploration_of(chosen, ctx).to(ctx.device)
            for name, chosen in config.exploration.items()
            if not acts_only or changes_actions(chosen.cls)
        }
        self.normalizer = Normalizer(config.preprocess, ctx.spec, len(ctx.env_ids)).to(ctx.device)
        self.normalize = self.normalizer if self.normalizer.obs else None
        teaches = None if acts_only else config.curriculum
        self.curriculum: Curriculum | None = teaches.build(ctx) if teaches else None
        self._modules = {"algorithm": self.algorithm, "exploration": self.exploration, "normalizer": self.normalizer}
        self._modules |= {"curriculum": self.curriculum} if teaches else {}

    def env(self, shard: EnvShard, render: bool = False) -> VecEnv:
        chosen = self.config.eval_env if shard.role == "eval" else self.config.env
        return chosen.build(self.ctx.derive(shard=shard, render=render))

    def shard(self, env_ids: Sequence[int], **options: Any) -> ShardCollector:
        """Create a collector of training environments in this process; options: see ``ShardCollector``."""
        total = self.config.num_envs
        seeds = np.random.SeedSequence([self.config.seed, TRAINING]).generate_state(total)[[*env_ids]].tolist()
        shard, keys = EnvShard("actor", total, env_ids), (*self.ctx.needs.keys, *self.ctx.needs.recorded)
        options |= {"finishing": self.finishing(keys), "normalize": self.normalize}
        return make_shard(self.env(shard), self.algorithm, self.ctx, shard, seeds, self.exploration, **options)

    def finishing(self, keys: Sequence[str]) -> list[Transform]:
        """Return the transforms of a segment on the collecting process, which store ``keys``."""
        return transforms(self.algorithm, self.ctx, keys, self.normalizer.normalized)

    def player(self) -> Player:
        """Create the player of jobs in this process."""
        keys = (*self.ctx.needs.keys, *self.ctx.needs.recorded, *["obs"] * self.config.preprocess.normalize_obs)
        entropy, make = (self.config.seed, JOBS), self.env
        return Player(make, self.algorithm, self.ctx, "job", entropy, keys, self.normalize, self.exploration)

    def state(self) -> Tree:
        """Return all weights, as stored in checkpoints."""
        return tree.map(lambda module: module.state_dict(), self._modules)

    def load(self, state: Tree) -> None:
        tree.map(lambda module, saved: module.load_state_dict(saved), self._modules, state)
        tree.map(lambda module: refuse_nan(module.named_parameters()), self._modules)

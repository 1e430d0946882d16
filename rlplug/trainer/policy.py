"""What acts: the learner trains it, and every actor has a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rlplug.api import Algorithm, Exploration, Loop, VecEnv
from rlplug.collection.collector import make_collector
from rlplug.collection.in_process import InProcessCollector
from rlplug.config import RunConfig
from rlplug.context import EnvShard, RunContext, needs_of
from rlplug.distributed.rng import GLOBAL
from rlplug.trainer.normalize import Normalizer
from rlplug.types import EnvSpec, Tree

TRAINING = 1  # tells training's environment seeds from evaluation's


class Policy:
    """Algorithm, exploration and preprocessing of a run, and the environments that they play.

    Args:
        copy: of what acts only: exploration modules that give rewards are the learner's alone.
    """

    def __init__(self, config: RunConfig, ctx: RunContext, copy: bool = False) -> None:
        for seed in GLOBAL:
            seed(config.seed % 2**32)
        self.config, self.ctx = config, ctx
        self.algorithm: Algorithm = config.algo.build(ctx).to(ctx.device)
        self.exploration: dict[str, Exploration] = {
            name: chosen.build(ctx).to(ctx.device)
            for name, chosen in config.exploration.items()
            if not copy or acts(chosen.cls)
        }
        self.normalizer: Normalizer = Normalizer(config.preprocess, ctx.spec, len(ctx.env_ids)).to(ctx.device)
        self.normalize = self.normalizer if self.normalizer.obs else None

    def env(self, shard: EnvShard, render: bool = False) -> VecEnv:
        return self.config.env.build(self.ctx.derive(shard=shard, render=render))

    def collector(self, env_ids: Sequence[int]) -> InProcessCollector:
        """Collection in this process from some of the training's environments."""
        total = self.config.num_envs
        seeds = np.random.SeedSequence([self.config.seed, TRAINING]).generate_state(total)
        shard = EnvShard("actor", total, env_ids)
        own = [int(seeds[i]) for i in env_ids]
        return make_collector(
            self.env(shard), self.algorithm, self.ctx, shard, own, self.exploration, normalize=self.normalize
        )

    # ---- copies ---------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, np.ndarray]:
        """What the algorithm acts with; changes with every update."""
        keys, state = self.algorithm.actor_keys(), self.algorithm.state_dict()
        return {key: state[key].detach().cpu().numpy() for key in keys}

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Act with what ``weights`` gave."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory that is shared is not to be written to: it is copied
            tensors = {key: torch.from_numpy(value) for key, value in weights.items()}
        self.algorithm.load_state_dict(tensors, strict=False)

    def statistics(self) -> Tree:
        """What else acting depends on, which is little: running moments, the state of exploration, schedules."""
        acting = {name: x for name, x in self.exploration.items() if acts(type(x))}
        return {
            "preprocess": _host(self.normalizer.obs.state_dict()),
            "exploration": {name: _host(extra.state_dict()) for name, extra in acting.items()},
            "step": self.ctx.schedules.step,
        }

    def follow(self, statistics: Tree) -> None:
        """Be as the policy was that said them."""
        self.normalizer.obs.load_state_dict(statistics["preprocess"])
        for name, state in statistics["exploration"].items():
            self.exploration[name].load_state_dict(state)
        self.ctx.schedules.refresh(statistics["step"])

    def changed(self, statistics: Tree) -> Tree:
        """What acting changed in the exploration modules of this copy, which was told ``statistics`` before."""
        told = statistics["exploration"]
        return {
            name: {key: now for key, now in _host(extra.state_dict()).items() if not torch.equal(now, told[name][key])}
            for name, extra in self.exploration.items()
        }

    def hear(self, actors: Sequence[Tree]) -> None:
        """What acting changed in the exploration modules of the copies, each of which saw other environments: numbers
        become their mean. What it did not change is as the learner has it, who may have moved it meanwhile."""
        for name in actors[0]["exploration"]:
            own = _host(self.exploration[name].state_dict())
            states = [own | actor["exploration"][name] for actor in actors]
            self.exploration[name].load_state_dict({key: _mean([s[key] for s in states]) for key in own})


def acts(extra: type[Exploration]) -> bool:
    """Do such modules change what is done?"""
    return any(getattr(extra, what) is not getattr(Exploration, what) for what in ("perturb", "perturb_weights"))


def context(
    config: RunConfig,
    spec: EnvSpec,
    loop: Loop,
    device: torch.device,
    env_ids: Sequence[int],
    rank: int = 0,
    world_size: int = 1,
) -> RunContext:
    """What a run's components are built with."""
    return RunContext(
        spec=spec,
        needs=needs_of(config.algo, config.models.values(), spec),
        slots=config.models,
        device=device,
        num_envs=config.num_envs,
        env_ids=env_ids,
        total_steps=config.total_steps,
        rollout_length=loop.rollout_length,
        batch_size=loop.batch_size,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        deterministic=config.deterministic,
    )


def read_spec(config: RunConfig) -> EnvSpec:
    """The spaces of the configured environment: one is made and closed."""
    nothing = EnvSpec({})
    env = config.env.build(RunContext(spec=nothing, seed=config.seed).derive(shard=EnvShard("learner", 1, range(1))))
    env.close()
    return env.spec


def loop_of(config: RunConfig, spec: EnvSpec) -> Loop:
    return config.loop.build(RunContext(spec=spec, num_envs=config.num_envs))


def _host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, which stays as it is."""
    return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}


def _mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Where all are equal, that very number: the sum of three may be rounded."""
    first, *others = values
    if not others or not first.is_floating_point():
        return first
    every = torch.stack([first, *others])
    return torch.where((every == first).all(0), first, every.mean(0))

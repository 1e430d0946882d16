"""Random Network Distillation, Burda et al. 2018 (arXiv:1810.12894)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch import nn as tnn

from rlplug import nn, tree
from rlplug.api import Context, Learner, Losses, Segment
from rlplug.functional.returns import discounted_sum
from rlplug.nn import Linear, precise
from rlplug.nn.moments import Moments
from rlplug.plugins.exploration.curiosity import Curiosity, network, next_obs
from rlplug.settings import (
    ModelNode,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch


class Whitened(tnn.Module):
    """Normalizes the Box parts of observations by running mean and standard deviation, and clips them."""

    def __init__(self, space: spaces.Space[Any], clip: float) -> None:
        super().__init__()
        self.clip, self.space = clip, space
        self.parts = tnn.ModuleDict()
        if isinstance(space, spaces.Dict):
            self.parts.update({f"{i}": Whitened(part, clip) for i, part in enumerate(space.spaces.values())})
            self.space = spaces.Dict({key: self.parts[f"{i}"].space for i, key in enumerate(space.spaces)})  # type: ignore[misc]
        elif isinstance(space, spaces.Box):
            self.space = spaces.Box(-clip, clip, space.shape, np.float32)
            self.moments = Moments(space.shape)

    def _inner(self, obs: Any) -> list[tuple[Any, Any]]:
        return list(zip(self.parts.values(), (obs[key] for key in self.space.spaces), strict=True))  # type: ignore[attr-defined]

    def observe(self, obs: Any, where: Tensor, learner: Learner) -> None:
        """Add the rows ``where`` of ``obs`` to the statistics."""
        if isinstance(self.space, spaces.Dict):
            for part, leaf in self._inner(obs):
                part.observe(leaf, where, learner)
        elif isinstance(self.space, spaces.Box):
            self.moments.add(obs[where], learner.gather)
            self.moments.commit()

    def forward(self, obs: Any) -> Any:
        if isinstance(self.space, spaces.Dict):
            inner = self._inner(obs)
            return {key: part(leaf) for key, (part, leaf) in zip(self.space.spaces, inner, strict=True)}
        if not isinstance(self.space, spaces.Box):
            return obs
        return ((obs - self.moments.mean) * self.moments.scale()).clamp(-self.clip, self.clip)


class RND(Curiosity):
    """Rewards observations by the error of a network that predicts the features of a random network."""

    traceable = True
    returns: Tensor

    @settings
    class Config:
        eta: Scheduled[NonNegativeFloat] = option("Factor of the intrinsic reward, after its normalization.")
        gamma: UnitFloat = option("Discount of the intrinsic return, whose standard deviation normalizes rewards.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        feature_dim: PositiveInt = option("Size of the random features.")
        feature: ModelNode = option("Network before the features, in both networks.")
        predictor_hiddens: list[PositiveInt] = option("Further hidden layers of the predictor.")
        obs_clip: PositiveFloat = option("Clip normalized observations to +- this.")
        update_proportion: UnitFloat = option("Fraction of rows, sampled at random, that train the predictor.")
        num_sgd_iter: PositiveInt = option("Epochs over each sample.")
        sgd_minibatch_size: PositiveInt | None = option(
            "Rows per gradient step, over all ranks; null: the whole sample."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.eta, self.lr = ctx.schedule(cfg.eta), ctx.schedule(cfg.lr)
        self.whitened = Whitened(ctx.spec.single_agent.obs, cfg.obs_clip)
        self.target = self._network([]).requires_grad_(False)
        self.predictor = self._network(cfg.predictor_hiddens)
        self.moments = Moments()
        self.register_buffer("returns", torch.zeros(ctx.num_envs))

    def _network(self, hiddens: Sequence[int]) -> tnn.ModuleDict:
        torso = network(self.ctx, self.cfg.feature, self.whitened.space, "exploration.rnd.feature")
        further = nn.MLP(torso.out_dim, hiddens, init="orthogonal")
        head = Linear(further.out_dim, self.cfg.feature_dim, gain=2**0.5)
        return tnn.ModuleDict({"torso": torso, "further": further, "head": head})

    def error(self, obs: Any) -> Tensor:
        """Return the mean squared prediction error, ``[...]``."""

        def features(net: Any) -> Tensor:
            return precise(net["head"], net["further"](net["torso"](seen, {}, None)[0]))

        seen = self.whitened(obs)
        return (features(self.predictor) - features(self.target).detach()).square().mean(-1)

    @torch.no_grad()
    def observe(self, segment: Segment, learner: Learner) -> None:
        """Update both running statistics equally on all ranks; replayed samples use the current statistics."""
        batch = tree.map(lambda x: x.to(self.returns.device), {key: segment.batch[key] for key in ("obs", "valid")})
        obs, valid = next_obs(batch), batch["valid"][:-1]
        self.whitened.observe(obs, valid, learner)
        error, valid = (learner.gather(x.T).T for x in (self.error(obs), valid))
        if segment.whole:
            sums = discounted_sum(error, valid, torch.zeros_like(error[0]), self.cfg.gamma)
        else:
            own = torch.tensor(self.ctx.env_ids[segment.columns], device=valid.device)
            env_ids = learner.gather(own)
            sums = discounted_sum(error, valid, self.returns[env_ids], self.cfg.gamma)
            self.returns[env_ids] = sums[-1]
        self.moments.add(sums[valid])
        self.moments.commit()

    def bonus(self, batch: Batch) -> Tensor:
        """Return the normalized error of the next observation, section 2.4."""
        return self.eta * self.error(next_obs(batch)) * self.moments.scale()

    def chosen(self, batch: Batch) -> Tensor:
        valid = super().chosen(batch)
        if self.cfg.update_proportion == 1.0:
            return valid
        drawn = self.ctx.rand(*reversed(valid.shape)).T
        return valid & (drawn < self.cfg.update_proportion)

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        return Losses({"distillation": batch.get("weight", 1.0) * self.error(next_obs(batch))})

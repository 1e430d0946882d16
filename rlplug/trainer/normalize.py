"""What the policy and the learner see of raw rows. Buffers, returns and evaluations keep what the environment said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from torch import Tensor, nn

from rlplug.api import Learner
from rlplug.config import Preprocess as Config
from rlplug.functional.returns import discounted_sum
from rlplug.nn.moments import Moments
from rlplug.types import Batch, ConfigError, EnvSpec, Tree


class Normalizer(nn.Module):
    """Normalised observations, and scaled, normalised and clipped rewards.

    Args:
        columns: environments of this process.

    Raises:
        ConfigError: there is nothing to normalise.
    """

    returns: Tensor

    def __init__(self, cfg: Config, spec: EnvSpec, columns: int) -> None:
        super().__init__()
        self.cfg = cfg
        leaves = dict(_vectors(spec.single_agent.obs)) if cfg.normalize_obs else {}
        if cfg.normalize_obs and not leaves:
            raise ConfigError(
                "preprocess.normalize_obs",
                f"there is no vector of numbers in the observations, {spec.single_agent.obs}",
            )
        self.obs = nn.ModuleDict({name: Moments(shape) for name, shape in leaves.items()})
        self.reward = Moments() if cfg.normalize_reward else None
        if cfg.normalize_reward:
            self.register_buffer("returns", torch.zeros(columns))
        self.alters_reward = cfg.normalize_reward or cfg.scale_reward != 1.0 or cfg.clip_reward is not None

    def forward(self, obs: Any) -> Any:
        """Observations ``[..., *space]`` as policy and learner see them."""
        return _mapped(obs, self._normalised) if self.obs else obs

    def normalized(self, batch: Batch) -> Batch:
        """A sample as the learner sees it."""
        if not self.obs and not self.alters_reward:
            return batch
        changed = {key: self(batch[key]) for key in ("obs",) if key in batch}
        return batch | changed | {"reward": self._reward(batch["reward"])}

    def observe(self, segment: Batch, learner: Learner) -> None:
        """Count every row of ``segment [T+1, B]`` that was acted on, once."""
        valid = segment["valid"]
        for name, moments in self._moments():
            moments.add(_at(segment["obs"], name)[valid], learner.gather)
        if self.reward is not None:
            self.reward.add(self._discounted(segment)[valid[:-1]], learner.gather)
            self.reward.commit()  # nobody acted by it

    def commit(self) -> None:
        """Before a round is collected: the observations until now count."""
        for _, moments in self._moments():
            moments.commit()

    def env_state(self) -> Tree:
        """Return what belongs to this process's environments; the rest is the same on all ranks."""
        return self.returns if self.cfg.normalize_reward else None

    def load_env_state(self, state: Tree) -> None:
        if state is not None:
            self.returns.copy_(state)

    def _moments(self) -> Iterator[tuple[str, Moments]]:
        yield from self.obs.items()  # type: ignore[misc]

    def _normalised(self, name: str, x: Tensor) -> Tensor:
        if name not in self.obs:
            return x
        moments: Any = self.obs[name]
        mean, scale = moments.mean.to(x.device), moments.scale().to(x.device)
        return ((x - mean) * scale).clamp(-self.cfg.clip_obs, self.cfg.clip_obs)

    def _reward(self, reward: Tensor) -> Tensor:
        if self.cfg.scale_reward != 1.0:
            reward = reward * self.cfg.scale_reward
        if self.reward is not None:
            reward = reward * self.reward.scale().to(reward.device)
        if self.cfg.clip_reward == "sign":
            return reward.sign()
        return reward if self.cfg.clip_reward is None else reward.clamp(-self.cfg.clip_reward, self.cfg.clip_reward)

    def _discounted(self, segment: Batch) -> Tensor:
        """``R <- gamma R + r`` along every episode, ``[T, B]``."""
        rows = [segment[key][:-1].to(self.returns.device) for key in ("reward", "valid", "is_first")]
        reward, valid, first = rows
        sums = discounted_sum(self.cfg.scale_reward * reward, valid, self.returns, self.cfg.reward_gamma, first)
        self.returns.copy_(sums[-1])
        return sums.to(segment["valid"].device)


def _vectors(space: Space[Any], name: str = "obs") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every part that is a vector of numbers."""
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            yield from _vectors(sub, f"{name}/{_plain(key)}")
    elif isinstance(space, Box) and np.issubdtype(space.dtype, np.floating) and len(space.shape) < 3:
        yield name, space.shape


def _mapped(tree: Any, function: Callable[[str, Tensor], Tensor], name: str = "obs") -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(part, function, f"{name}/{_plain(key)}") for key, part in tree.items()}
    return function(name, tree)


def _at(obs: Any, name: str) -> Tensor:
    for key in name.split("/")[1:]:
        obs = next(part for own, part in obs.items() if _plain(own) == key)
    return obs


def _plain(key: str) -> str:
    """A key as part of the name of a module, which has no dots, and of a path."""
    return quote(key, safe="").replace(".", "%2E")

"""Normalization of policy and learner inputs. Buffers, returns and evaluations keep raw values."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Space
from torch import Tensor, nn

from rlplug.api import Learner, Segment
from rlplug.config import Preprocess as Config
from rlplug.functional.returns import discounted_sum
from rlplug.nn.moments import Moments, SpaceMoments
from rlplug.types import KEYS, Batch, ConfigError, EnvSpec, Tree


class Normalizer(nn.Module):
    """Normalizes observations, and scales, normalizes and clips rewards.

    Raises:
        ConfigError: there is nothing to normalize.
    """

    returns: Tensor

    def __init__(self, cfg: Config, spec: EnvSpec, num_envs: int) -> None:
        super().__init__()
        if spec.has_agents and cfg.normalize_reward:
            said = "supports the return of one agent, but the environment has several; use false"
            raise ConfigError("preprocess.normalize_reward", said)
        if spec.nested and cfg.normalize_obs:
            said = f"supports one group of agents, but the environment has {', '.join(spec.nested)}; use false"
            raise ConfigError("preprocess.normalize_obs", said)
        (group, *_) = spec.groups.values()
        self._opaque = {*KEYS, *spec.extras}  # values of these keys are not nested batches
        self.cfg, self.obs = cfg, SpaceMoments(group.obs if cfg.normalize_obs else Space(), cfg.clip_obs)
        if cfg.normalize_obs and not self.obs:
            raise ConfigError("preprocess.normalize_obs", f"the observations contain no vector of numbers: {group.obs}")
        if isinstance(clip := cfg.clip_reward, tuple) and clip[0] >= clip[1]:
            raise ConfigError("preprocess.clip_reward", f"{[*clip]} has no range; the first should be below the second")
        self._changes = self.counts or cfg.scale_reward != 1.0 or cfg.clip_reward is not None
        self.reward = Moments() if cfg.normalize_reward else None
        self.register_buffer("returns", torch.zeros(num_envs) if cfg.normalize_reward else None)

    @property
    def counts(self) -> bool:
        """Return whether it has running statistics."""
        return bool(self.obs) or self.cfg.normalize_reward

    def forward(self, obs: Any) -> Any:
        """Return normalized observations ``[..., *space]``."""
        return self.obs(obs) if self.obs else obs

    def normalized(self, batch: Batch) -> Batch:
        """Return a normalized sample, leaves ``[T+1, B, ...]``.

        Nested batches, of groups or of a loop with several batches, are normalized in the same way.
        """
        if not self._changes:
            return {**batch}
        views, apart = {"obs": self, "reward": self._reward}, {"obs", "reward", "valid"}.isdisjoint(batch)

        def seen(key: str, x: Any) -> Any:
            if key in views:
                return views[key](x)
            rows = isinstance(x, dict) and key not in self._opaque and (apart or "alive" in x or "valid" in x)
            return self.normalized(x) if rows else x

        return {key: seen(key, x) for key, x in batch.items()}

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Update the running statistics with every row of a segment that has an action."""
        batch, valid = segment.batch, segment.batch["valid"]
        if self.obs:
            acted = valid.unsqueeze(-1) & batch["alive"] if "alive" in batch else valid
            self.obs.add(batch["obs"], acted, learner.gather)
        if self.reward is not None:
            reward, acted, first = (batch[key][:-1].to(self.returns.device) for key in ("reward", "valid", "is_first"))
            returns = torch.zeros_like(reward[0]) if segment.whole else self.returns[segment.columns]
            sums = discounted_sum(self.cfg.scale_reward * reward, acted, returns, self.cfg.reward_gamma, first)
            if not segment.whole:
                returns.copy_(sums[-1])
            self.reward.add(sums.to(valid.device)[valid[:-1]], learner.gather)
            self.reward.commit()  # acting does not depend on it

    def commit(self) -> None:
        """Include all observations so far in the statistics; called between rounds."""
        self.obs.commit()

    def env_state(self) -> Tree:
        """Return the state of this process's environments; the rest is equal on all ranks."""
        return self.returns

    def load_env_state(self, state: Tree) -> None:
        if state is not None:
            self.returns.copy_(state)

    def _reward(self, reward: Tensor) -> Tensor:
        reward, clip = reward * self.cfg.scale_reward, self.cfg.clip_reward
        if self.reward is not None:
            reward = reward * self.reward.scale().to(reward.device)
        if clip is None or clip == "sign":
            return reward if clip is None else reward.sign()
        return reward.clamp(*(clip if isinstance(clip, tuple) else (-clip, clip)))

"""What the policy and the learner see of raw rows. Buffers, returns and evaluations keep what the environment said."""

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
    """Normalized observations, and scaled, normalized and clipped rewards, of this process's environments.

    Raises:
        ConfigError: there is nothing to normalize.
    """

    returns: Tensor

    def __init__(self, cfg: Config, spec: EnvSpec, num_envs: int) -> None:
        super().__init__()
        if spec.has_agents and cfg.normalize_reward:
            said = "knows the return of one agent, and the environment has several; take false"
            raise ConfigError("preprocess.normalize_reward", said)
        if spec.nested and cfg.normalize_obs:
            said = f"knows one group of agents, and the environment has {', '.join(spec.nested)}; take false"
            raise ConfigError("preprocess.normalize_obs", said)
        (group, *_) = spec.groups.values()
        self._opaque = {*KEYS, *spec.extras}  # what these hold is no batch
        self.cfg, self.obs = cfg, SpaceMoments(group.obs if cfg.normalize_obs else Space(), cfg.clip_obs)
        if cfg.normalize_obs and not self.obs:
            said = f"there is no vector of numbers in the observations, {group.obs}"
            raise ConfigError("preprocess.normalize_obs", said)
        self._changes = self.counts or cfg.scale_reward != 1.0 or cfg.clip_reward is not None
        self.reward = Moments() if cfg.normalize_reward else None
        self.register_buffer("returns", torch.zeros(num_envs) if cfg.normalize_reward else None)

    @property
    def counts(self) -> bool:
        """Whether it has running statistics."""
        return bool(self.obs) or self.cfg.normalize_reward

    def forward(self, obs: Any) -> Any:
        """Return observations ``[..., *space]`` as policy and learner see them."""
        return self.obs(obs) if self.obs else obs

    def normalized(self, batch: Batch) -> Batch:
        """Return a sample, leaves ``[T+1, B, ...]``, as the learner sees it.

        So it does with the batches in it, which have rows of their own: of groups, and of a loop that gives several.
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
        """Count every row of a segment that was acted on, once."""
        batch, valid = segment.batch, segment.batch["valid"]
        if self.obs:
            acted = valid.unsqueeze(-1) & batch["alive"] if "alive" in batch else valid
            self.obs.add(batch["obs"], acted, learner.gather)
        if self.reward is not None:
            reward, acted, first = (batch[key][:-1].to(self.returns.device) for key in ("reward", "valid", "is_first"))
            returns = torch.zeros_like(reward[0]) if segment.whole else self.returns[segment.columns]
            scaled = self.cfg.scale_reward * reward
            sums = discounted_sum(scaled, acted, returns, self.cfg.reward_gamma, first)
            if not segment.whole:
                returns.copy_(sums[-1])
            self.reward.add(sums.to(valid.device)[valid[:-1]], learner.gather)
            self.reward.commit()  # nobody acted by it

    def commit(self) -> None:
        """Let the observations until now count; called before a round is collected."""
        self.obs.commit()

    def env_state(self) -> Tree:
        """Return what belongs to this process's environments; the rest is the same on all ranks."""
        return self.returns

    def load_env_state(self, state: Tree) -> None:
        if state is not None:
            self.returns.copy_(state)

    def _reward(self, reward: Tensor) -> Tensor:
        if self.cfg.scale_reward != 1.0:
            reward = reward * self.cfg.scale_reward
        if self.reward is not None:
            reward = reward * self.reward.scale().to(reward.device)
        if self.cfg.clip_reward == "sign":
            return reward.sign()
        return reward if self.cfg.clip_reward is None else reward.clamp(-self.cfg.clip_reward, self.cfg.clip_reward)

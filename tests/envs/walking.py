"""What the tests of environments share: one small environment with awkward spaces, and rows made transitions."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from rlplug.envs.spaces import copy


class Walk(gymnasium.Env):
    """A random walk that ends beyond +-2; spaces that have to change: float64 in a Dict, Discrete from 5 and 1."""

    observation_space = Dict({"position": Box(-np.inf, np.inf, (2,), np.float64), "side": Discrete(3, start=5)})
    action_space = Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-0.5, 0.5, 2)
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.position = self.position + (action - 1.5) + self.np_random.normal(0.0, 0.3, 2)
        return self._obs(), float(self.position.sum()), bool(abs(self.position[0]) > 2), False, {"noise": 1}

    def _obs(self):
        return {"position": self.position, "side": 6 + int(np.sign(self.position[0]))}


def flat(obs):
    """Observations as one float array ``[B, D]``."""
    parts = obs.values() if isinstance(obs, dict) else [obs]
    return np.concatenate([np.asarray(part, np.float64).reshape(len(part), -1) for part in parts], axis=1)


def linear_policy(space):
    """A deterministic function of the observation that visits good and bad states."""

    def policy(obs):
        score = np.sin(37.0 * flat(obs).sum(1))
        if isinstance(space, Discrete):
            return (score > 0).astype(np.int64)
        return np.repeat(score[:, None], space.shape[0], axis=1).astype(np.float32)

    return policy


def transitions(env, seeds, steps):
    """Per column the transitions ``(obs, action, reward, terminated, truncated, next obs)`` of ``steps`` steps."""
    policy = linear_policy(env.spec.sole.action)
    columns = [[] for _ in seeds]
    obs = copy(env.reset(seeds)["obs"])
    final = np.zeros(len(seeds), bool)
    for _ in range(steps):
        action = policy(obs)
        row = copy(env.step(action))
        after = flat(row.get("final_obs", row["obs"]))
        ended = row["terminated"] | row["truncated"]
        for i, column in enumerate(columns):
            if not final[i]:
                outcome = float(row["reward"][i]), bool(row["terminated"][i]), bool(row["truncated"][i])
                column.append((flat(obs)[i].tolist(), action[i].tolist(), *outcome, after[i].tolist()))
        final = ended & env.lockstep
        obs = row["obs"]
    return columns

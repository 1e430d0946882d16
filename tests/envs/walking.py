"""What the tests of environments share: one small environment with awkward spaces, and rows made transitions."""

import sys
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode

from rlplug import tree


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


class Windy(gymnasium.Env):
    """Says in ``info`` what follows from the observation ``[seed, step]``; episodes of 4 steps.

    Args:
        lacks: the step whose info is empty; 0: the reset.
        says: what else is in the infos of these steps.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, lacks=None, says=None):
        self.lacks, self.says = lacks, says or {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.steps = int(self.np_random.integers(1000)), 0
        return self._said()

    def step(self, action):
        self.steps += 1
        obs, info = self._said()
        return obs, 1.0, self.steps == 4, False, info

    def _said(self):
        wind = [[2 * self.start, 2.5 * self.steps, 0]]
        info = {"wind": wind, "steps": self.steps, "odd": self.steps % 2 == 1} | self.says.get(self.steps, {})
        return np.array([self.start, self.steps], np.float32), {} if self.lacks == self.steps else info


gymnasium.register("Windy-v0", "tests.envs.walking:Windy")


class Bare(Walk):
    """Says whether its process has imported torch."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        obs["position"] = np.full(2, float("torch" in sys.modules))
        return obs, info


class Stuck(Walk):
    """Never comes back from a step."""

    def step(self, action):
        time.sleep(1000)


class Faulty(gymnasium.Env):
    """Says nothing wrong up to step 2 of an episode, and then ``fault(self)``: (observation, info); or at a reset."""

    observation_space = Tuple([Box(-1, 1, (2,), np.float32), Discrete(3, start=5)])
    action_space = MultiDiscrete([2, 3])

    def __init__(self, fault, at_reset=False):
        self.fault, self.at_reset = fault, at_reset

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.fault(self) if self.at_reset else self.fine()

    def step(self, action):
        self.steps += 1
        obs, info = self.fault(self) if self.steps == 3 else self.fine()
        return obs, 0.0, False, False, info

    def fine(self):
        return (np.zeros(2, np.float32), 5), {"action_mask": (np.ones(2, np.int8), np.array([0, 1, 1], np.int8))}


class Everything(gymnasium.Env):
    """All kinds of observations, nested, and a mask among them that excludes every action but two."""

    observation_space = Dict(
        {
            "seen": Tuple([Box(0, 255, (4, 5, 3), np.uint8), Dict(turn=Discrete(3, start=-1))]),
            "bits": MultiBinary((2, 2)),
            "hand": MultiDiscrete([3, 4], start=[1, 0]),
            "action_mask": MultiBinary(5),
        }
    )
    action_space = Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action):
        self.steps += 1
        return self._obs(), float(action), self.steps == 7, False, {}

    def _obs(self):
        random = self.np_random
        mask = np.zeros(5, np.int8)
        mask[random.choice(5, 2, replace=False)] = 1
        return {
            "seen": (random.integers(0, 256, (4, 5, 3), np.uint8), {"turn": int(random.integers(-1, 2))}),
            "bits": random.integers(0, 2, (2, 2), np.int8),
            "hand": random.integers([1, 0], [4, 4]),
            "action_mask": mask,
        }


class Counting(gymnasium.Env):
    """Images that show the number of the step; the action is the reward; endless."""

    action_space = Discrete(10)

    def __init__(self, shape=(6, 7)):
        self.observation_space = Box(0, 255, shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 1
        return self._obs(), {}

    def step(self, action):
        self.steps += 1
        return self._obs(), float(action), False, False, {}

    def _obs(self):
        obs = np.full(self.observation_space.shape, self.steps % 256, np.uint8)
        if obs.ndim == 3:
            obs += 100 * np.arange(obs.shape[-1], dtype=np.uint8)
        return obs


def rows(env, steps, seeds, policy=None):
    """Copied rows under actions drawn by ``policy(row)``; by default out of a fixed sequence."""
    space = env.spec.single_agent.action
    space.seed(0)
    out = [tree.map(np.array, env.reset(seeds))]
    for _ in range(steps):
        action = policy(out[-1]) if policy else np.stack([space.sample() for _ in seeds])
        out.append(tree.map(np.array, env.step(action)))
    return out


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
    policy = linear_policy(env.spec.single_agent.action)
    columns = [[] for _ in seeds]
    obs = tree.map(np.array, env.reset(seeds)["obs"])
    final = np.zeros(len(seeds), bool)
    for _ in range(steps):
        action = policy(obs)
        row = tree.map(np.array, env.step(action))
        after = flat(row.get("final_obs", row["obs"]))
        ended = row["terminated"] | row["truncated"]
        for i, column in enumerate(columns):
            if not final[i]:
                outcome = float(row["reward"][i]), bool(row["terminated"][i]), bool(row["truncated"][i])
                column.append((flat(obs)[i].tolist(), action[i].tolist(), *outcome, after[i].tolist()))
        final = ended & (env.autoreset is AutoresetMode.NEXT_STEP)
        obs = row["obs"]
    return columns

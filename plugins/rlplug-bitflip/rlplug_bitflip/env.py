"""Bit flipping, the environment of Andrychowicz et al. 2017 (arXiv:1707.01495, section 3.1)."""

import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode
from rlplug import Context, EnvSpec, EnvTraits, Group, VecEnv
from rlplug.settings import PositiveInt, option, settings


class BitFlip(VecEnv):
    """Flip one of `size` bits per step, until they equal a goal. Every episode samples bits and goal.

    A step that does not reach the goal costs 1, and an episode has at most `size` steps: random exploration cannot
    search 2^size states. `reward` and `terminated` also accept other goals, for hindsight experience replay.

    All columns of the vector are stepped at once. NEXT_STEP: the next step resets an ended column, ignores its action
    and gives no reward.
    """

    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        size: PositiveInt = option("Number of bits, and of steps after which an episode is truncated.")

    def __init__(self, cfg: Config, ctx: Context):
        self.size, self.columns = cfg.size, np.arange(len(ctx.env_ids))  # one column per environment of this process
        self.traits = EnvTraits(goals=lambda: self)
        bits = MultiBinary(cfg.size)
        obs = Dict({"observation": bits, "achieved_goal": bits, "desired_goal": bits})
        self.spec = EnvSpec({"default": Group(obs, Discrete(cfg.size))}, max_episode_steps=cfg.size)

    def reset(self, seeds, tasks=None):
        """Start an episode in every column; all later rows depend only on the column's seed and actions."""
        self.draws = [np.random.default_rng(seed) for seed in seeds]
        self.bits, self.goal = (np.zeros((len(self.columns), self.size), np.int8) for _ in range(2))
        self.time, self.over = np.zeros(len(self.columns), np.int64), np.ones(len(self.columns), np.bool_)
        self.begin()
        self.over[:] = False
        return {"obs": self.obs()}

    def begin(self):
        """Sample different bits and goals for the columns that ended."""
        for column in np.flatnonzero(self.over):
            self.bits[column], self.goal[column] = self.draws[column].integers(2, size=(2, self.size))
            if (self.bits[column] == self.goal[column]).all():
                self.goal[column, 0] ^= 1
        self.time[self.over] = 0

    def step(self, action):
        """Return the next observations, rewards and ends of actions `[B]`."""
        acted = ~self.over
        self.bits[self.columns[acted], action[acted]] ^= 1
        self.time += acted
        reward = np.where(acted, self.reward(self.bits, self.goal), np.float32(0))
        terminated = self.terminated(self.bits, self.goal) & acted
        truncated = (self.time == self.size) & ~terminated & acted
        self.begin()
        self.over = terminated | truncated
        return {"obs": self.obs(), "reward": reward, "terminated": terminated, "truncated": truncated}

    def obs(self):
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}

    def reward(self, achieved, desired):
        """Return rewards `[n]` of achieved and desired bits `[n, size]`."""
        return -(achieved != desired).any(-1).astype(np.float32)

    def terminated(self, achieved, desired):
        return (achieved == desired).all(-1)

    def state(self):
        """Return all state that determines the next steps, so that a killed run resumes exactly."""
        kept = {key: getattr(self, key).copy() for key in ("bits", "goal", "time", "over")}
        return kept | {"draws": [draw.bit_generator.state for draw in self.draws]}

    def load(self, state):
        for key in ("bits", "goal", "time", "over"):
            setattr(self, key, state[key].copy())
        self.draws = [np.random.default_rng() for _ in self.columns]
        for draw, one in zip(self.draws, state["draws"], strict=True):
            draw.bit_generator.state = one

    def close(self):
        pass

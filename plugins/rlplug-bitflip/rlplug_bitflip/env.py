"""Flipping bits, the environment of Andrychowicz et al. 2017 (arXiv:1707.01495, section 3.1)."""

import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode
from rlplug import Context, EnvSpec, EnvTraits, Group, VecEnv
from rlplug.settings import PositiveInt, option, settings


class BitFlip(VecEnv):
    """Flip one of `size` bits a step, until they are those of a goal. Bits and goal are drawn for every episode.

    A step that leaves another state than the goal costs 1, and an episode has at most `size` steps: by chance, 2^size
    states are never searched. `reward` and `terminated` also serve other goals, from which hindsight learns.

    All columns of the vector are stepped at once. NEXT_STEP: a column that ended is reset by the next step, which
    ignores its action and gives no reward.
    """

    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        size: PositiveInt = option("Number of bits, and of steps after which an episode is truncated.")

    def __init__(self, cfg: Config, ctx: Context):
        self.size, self.columns = cfg.size, np.arange(len(ctx.env_ids))  # a column for each environment of this process
        self.traits = EnvTraits(goals=lambda: self)
        bits = MultiBinary(cfg.size)
        obs = Dict({"observation": bits, "achieved_goal": bits, "desired_goal": bits})
        self.spec = EnvSpec({"default": Group(obs, Discrete(cfg.size))}, max_episode_steps=cfg.size)

    def reset(self, seeds, tasks=None):
        """Begin an episode in every column; everything that follows depends on the column's seed alone."""
        self.draws = [np.random.default_rng(seed) for seed in seeds]
        self.bits, self.goal = (np.zeros((len(self.columns), self.size), np.int8) for _ in range(2))
        self.time, self.over = np.zeros(len(self.columns), np.int64), np.ones(len(self.columns), np.bool_)
        self.begin()
        self.over[:] = False
        return {"obs": self.obs()}

    def begin(self):
        """Draw the bits and the goal of the columns that are over; they differ."""
        for column in np.flatnonzero(self.over):
            self.bits[column], self.goal[column] = self.draws[column].integers(2, size=(2, self.size))
            if (self.bits[column] == self.goal[column]).all():
                self.goal[column, 0] ^= 1
        self.time[self.over] = 0

    def step(self, action):
        """Actions `[B]` to the next observations, and the rewards and ends of these actions."""
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
        """Bits `[n, size]` that were reached and that were to be reached, to rewards `[n]`."""
        return -(achieved != desired).any(-1).astype(np.float32)

    def terminated(self, achieved, desired):
        return (achieved == desired).all(-1)

    def state(self):
        """Everything on which the next steps depend, so that a run that was killed goes on exactly."""
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

"""Deep Sea from bsuite, Osband et al. 2019 (arXiv:1908.03568, appendix A)."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from rlplug import Context, EnvSpec, Group, VecEnv
from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, option, settings


class DeepSea(VecEnv):
    """A diver sinks one row per step through ``size x size`` cells, and moves left or right.

    Moving right costs ``move_cost / size`` per step; moving right in every step reaches a treasure worth 1 in the last
    row. The action that moves right is sampled for every cell. All columns of the vector are stepped in lockstep: the
    next step resets an ended column, and ignores its action.
    """

    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        size: PositiveInt = option("Rows and columns of the grid, and steps of an episode.")
        move_cost: NonNegativeFloat = option("Total cost of moving right in every step.")
        slip: NonNegativeFloat = option("Probability that a move to the right fails; 0: deterministic.")
        mapping_seed: NonNegativeInt = option("Seed of the action that moves right in each cell.")

    def __init__(self, cfg: Config, ctx: Context):
        self.cfg, self.columns = cfg, np.arange(len(ctx.env_ids))
        self.right = np.random.default_rng(cfg.mapping_seed).integers(2, size=(cfg.size, cfg.size))
        obs = Box(0.0, 1.0, (cfg.size, cfg.size), np.float32)
        self.spec = EnvSpec({"default": Group(obs, Discrete(2))}, max_episode_steps=cfg.size)

    def reset(self, seeds, tasks=None):
        self.draws = [np.random.default_rng(seed) for seed in seeds]
        self.row, self.column = np.zeros_like(self.columns), np.zeros_like(self.columns)
        return {"obs": self._obs()}

    def step(self, action):
        size, over = self.cfg.size, self.row == self.cfg.size
        cell = np.minimum(self.row, size - 1), self.column
        right = (action == self.right[cell]) & ~over
        goes = right & ([draw.random() for draw in self.draws] >= np.float64(self.cfg.slip))
        treasure = goes & (self.row == size - 1) & (self.column == size - 1)
        moved = np.clip(self.column + np.where(goes, 1, -1), 0, size - 1)
        self.row, self.column = np.where(over, 0, self.row + 1), np.where(over, 0, moved)
        reward = (treasure - right * self.cfg.move_cost / size).astype(np.float32)
        ended = self.row == size
        return {"obs": self._obs(), "reward": reward, "terminated": ended, "truncated": np.zeros_like(ended)}

    def _obs(self):
        """Return one-hot observations, zeros below the last row."""
        obs = np.zeros((len(self.columns), self.cfg.size + 1, self.cfg.size), np.float32)
        obs[self.columns, self.row, self.column] = 1.0
        return obs[:, :-1]

    def state(self):
        return {"row": self.row, "column": self.column, "draws": [draw.bit_generator.state for draw in self.draws]}

    def load(self, state):
        self.row, self.column = state["row"].copy(), state["column"].copy()
        self.draws = [np.random.default_rng() for _ in self.columns]
        for draw, one in zip(self.draws, state["draws"], strict=True):
            draw.bit_generator.state = one

    def close(self):
        pass

"""Components that behave badly, whatever they learn: built-in ones, each with one bug."""

from __future__ import annotations

import numpy as np
import torch

from rlplug.api import Losses, VecEnv
from rlplug.envs import make_list
from rlplug.envs.making import find
from rlplug.plugins.algo.a2c import A2C
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.linear_bandit import LinUCB
from rlplug.plugins.algo.ppo import PPO
from rlplug.plugins.algo.sac import SAC
from rlplug.plugins.buffer.prioritized import Prioritized
from rlplug.plugins.buffer.replay import Replay
from rlplug.plugins.exploration.discrete import EpsilonGreedy
from rlplug.plugins.exploration.noise import Gaussian
from rlplug.settings import settings

# ---- schedules -------------------------------------------------------------------------------------------------------


class PpoFreezesTheClip(PPO):
    """A schedule frozen at its first value: the clip is a number from the start on."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.clip_param = self.clip_param.clone()


class SacFreezesItsStep(SAC):
    """A schedule frozen at its first value: the optimizer has a number."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.actor_lr = self.actor_lr.clone()


class LinUcbFreezesItsWidth(LinUCB):
    """A schedule frozen at its first value, in what acts."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.alpha = float(self.alpha)


class FrozenEpsilon(EpsilonGreedy):
    """A schedule frozen at its first value, in an exploration module."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.epsilon = self.epsilon.clone()


# ---- rows, pickles, randomness, state --------------------------------------------------------------------------------


class DqnScalesRewardsInPlace(DQN):
    """``prepare`` changes the batch in place, of which the buffer or others have the memory."""

    def prepare(self, batch):
        batch["reward"].mul_(0.1)
        return super().prepare(batch)


class PpoPopsRows(PPO):
    """``prepare`` takes a key out of the batch that it is given."""

    def prepare(self, batch):
        prepared = super().prepare(batch)
        batch.pop("reward")
        return prepared


class A2cShiftsObservationsInPlace(A2C):
    """``act`` centers the observation in place, which is stored afterwards."""

    def act(self, step, carry, mode):
        step["obs"].sub_(0.1)
        return super().act(step, carry, mode)


class PpoHasALambda(PPO):
    """It cannot be pickled."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.scale = lambda x: x / 10.0


class PpoDropsItsWeights(PPO):
    """A pickled copy has other weights."""

    def __setstate__(self, state):
        super().__setstate__(state)
        for p in self.parameters():
            p.data = torch.zeros_like(p)


class SacDrawsFromTorch(SAC):
    """Draws from the global generator."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {key: torch.randn_like(rows[key]) for key in ("noise", "next_noise") if key in rows}


class DqnSharesOneDraw(DQN):
    """Acts by one random number for all environments, of which ranks then have different ones."""

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return out | ({"action": out["action"] * 0 + out["action"][0]} if mode == "greedy" else {}), carry


class DqnReturnsAMean(DQN):
    """The loss is a mean over the rows of a process, which are not as many everywhere."""

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses({"critic": losses.terms["critic"].mean() * len(batch["action"])}, feedback=losses.feedback)


# ---- exploration, buffers, environments ------------------------------------------------------------------------------


class EpsilonOutsideTheMask(EpsilonGreedy):
    """Random actions are drawn from all, and not from those that the mask allows."""

    def perturb(self, out, step, carry):
        return super().perturb(out, {key: leaf for key, leaf in step.items() if key != "action_mask"}, carry)


class GaussianInPlace(Gaussian):
    """Noise is added to the action of ``act`` in place."""

    def perturb(self, out, step, carry):
        out["action"].add_(self.ctx.randn(len(out["action"]), *self.shape)).clamp_(-1.0, 1.0)
        return out, carry


class GaussianFromNumpy(Gaussian):
    """Noise is drawn from numpy's global generator."""

    def perturb(self, out, step, carry):
        noise = torch.from_numpy(np.random.randn(*out["action"].shape)).float()
        return out | {"action": (out["action"] + 0.1 * noise).clamp(-1.0, 1.0)}, carry


class Weightless(Prioritized):
    """Draws by priority, and gives every sample the weight 1."""

    def sample(self):
        batch = super().sample()
        return batch | {"weight": torch.ones_like(batch["weight"])}


class DeafToPriorities(Prioritized):
    """Ignores what is fed back."""

    def feedback(self, index, values):
        pass


class DrawsFromNumpy(Replay):
    """Draws from a generator that no seed and no checkpoint reaches."""

    def draw(self):
        *_, drawn = super().draw()
        ids = self._ids(np.random.default_rng().integers(len(self), size=self.batch_size))
        return *np.divmod(ids, self.columns), drawn | {"index": torch.from_numpy(ids)}


class MixesEnds(Replay):
    """Stores a truncation as a termination."""

    def sample(self):
        batch = super().sample()
        return batch | {"terminated": batch["terminated"] | batch["truncated"]}


class ShiftsRewards(Replay):
    """Gives a row the reward of the row after it."""

    def sample(self):
        batch = super().sample()
        return batch | {"reward": batch["reward"].roll(-1, 0)}


@settings
class Nothing:
    pass


class Changed(VecEnv):
    """CartPole whose rows a subclass changes."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = make_list(find("CartPole-v1"), len(ctx.env_ids))
        reset, step = env.reset, env.step
        env.reset = lambda seeds, tasks=None: reset(cls.seeds(seeds))
        env.step = lambda action: cls.changed(step(action), action)
        return env

    @staticmethod
    def seeds(seeds):
        return seeds

    @staticmethod
    def changed(row, action):
        return row


class IgnoresItsSeed(Changed):
    """``reset`` draws from the system's entropy."""

    @staticmethod
    def seeds(seeds):
        return np.random.default_rng().integers(2**31, size=len(seeds)).tolist()


class CountsAfterTheEnd(Changed):
    """The row that resets an episode has a reward."""

    @staticmethod
    def changed(row, action):
        return row | {"reward": np.ones_like(row["reward"])}


class WritesIntoActions(Changed):
    """``step`` changes the array of actions that it receives."""

    @staticmethod
    def changed(row, action):
        action[:] = 0
        return row


class LeavesItsSpace(Changed):
    """Observations are outside of the space that is declared."""

    @staticmethod
    def changed(row, action):
        return row | {"obs": row["obs"] + np.float32(100.0)}


class NeverEnds(Changed):
    """Episodes go on past the limit that is declared."""

    @staticmethod
    def changed(row, action):
        return row | {key: np.zeros_like(row[key]) for key in ("terminated", "truncated")}

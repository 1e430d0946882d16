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


class A2cCentersRewards(A2C):
    """Keeps a running mean on ``self``, and not in a buffer, so that resumed runs begin with another one."""

    mean = 0.0

    def prepare(self, batch):
        self.mean += 0.1 * (float(batch["reward"].mean()) - self.mean)
        return super().prepare(batch | {"reward": batch["reward"] - self.mean})


class PpoMeansOverItsOwnRows(PPO):
    """Advantages are normalized over the rows of this process."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"advantage": rows["advantage"] - rows["advantage"].mean()}


class DqnReturnsAMean(DQN):
    """The loss is a mean over the rows of a process, which are not as many everywhere."""

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses({"critic": losses.terms["critic"].mean() * len(batch["action"])}, feedback=losses.feedback)


class DqnCountsSteps(DQN):
    """The target network follows a counter that no checkpoint has."""

    counted = 0

    def after_step(self, parts, losses, learner):
        self.steps.fill_(self.counted)
        self.counted += 1
        super().after_step(parts, losses, learner)


class PpoNormsTheBatch(PPO):
    """The loss of a row depends on the largest one of its batch."""

    def forward(self, batch, parts):
        return super().forward(batch | {"advantage": batch["advantage"] / batch["advantage"].abs().max()}, parts)


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


def cartpole(ctx):
    return make_list(find("CartPole-v1"), len(ctx.env_ids))


class IgnoresItsSeed(VecEnv):
    """``reset`` draws from the system's entropy."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = cartpole(ctx)
        reset = env.reset
        env.reset = lambda seeds, tasks=None: reset(np.random.default_rng().integers(2**31, size=len(seeds)).tolist())
        return env


class CountsAfterTheEnd(VecEnv):
    """The row that resets an episode has a reward."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = cartpole(ctx)
        step = env.step

        def paid(action):
            row = step(action)
            return row | {"reward": np.ones_like(row["reward"])}

        env.step = paid
        return env


class WritesIntoActions(VecEnv):
    """``step`` changes the array of actions that it receives."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = cartpole(ctx)
        step = env.step

        def changed(action):
            row = step(action)
            action[:] = 0
            return row

        env.step = changed
        return env


class LeavesItsSpace(VecEnv):
    """Observations are outside of the space that is declared."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = cartpole(ctx)
        step = env.step

        def far(action):
            row = step(action)
            return row | {"obs": row["obs"] + np.float32(100.0)}

        env.step = far
        return env


class NeverEnds(VecEnv):
    """Episodes go on past the limit that is declared."""

    Config = Nothing

    def __new__(cls, cfg, ctx):
        env = cartpole(ctx)
        step = env.step

        def going_on(action):
            row = step(action)
            return row | {key: np.zeros_like(row[key]) for key in ("terminated", "truncated")}

        env.step = going_on
        return env

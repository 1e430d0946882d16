"""Algorithms that learn something wrong: built-in ones, each with one bug. The docstring says which."""

from __future__ import annotations

import torch

from rlplug.api import Losses
from rlplug.functional.returns import gae
from rlplug.functional.td import gather_action
from rlplug.plugins.algo.a2c import A2C
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.impala import IMPALA
from rlplug.plugins.algo.iql import IQL
from rlplug.plugins.algo.linear_bandit import LinUCB
from rlplug.plugins.algo.marwil import BC, MARWIL
from rlplug.plugins.algo.ppo import PPO
from rlplug.plugins.algo.sac import SAC


def none(flags):
    return torch.zeros_like(flags)


# ---- ends of episodes ------------------------------------------------------------------------------------------------


class DqnBootstrapsAfterTheEnd(DQN):
    """Termination ignored."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": none(batch["terminated"])})


class PpoBootstrapsAfterTheEnd(PPO):
    """Termination ignored."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": none(batch["terminated"])})


class SacSwapsEnds(SAC):
    """Termination taken for truncation, and the reverse."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": batch["truncated"]})


class DqnEndsAtTruncation(DQN):
    """Truncation taken for termination."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": batch["terminated"] | batch["truncated"]})


class PpoEndsAtTruncation(PPO):
    """Truncation taken for termination."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": batch["terminated"] | batch["truncated"]})


class MarwilEndsAtTruncation(MARWIL):
    """Truncation taken for termination: returns of recorded episodes stop there."""

    def prepare(self, batch):
        return super().prepare(batch | {"terminated": batch["terminated"] | batch["truncated"]})


class A2cLeaksAcrossEpisodes(A2C):
    """Returns run on from the next episode into the one that ended."""

    def forward(self, batch, parts):
        return super().forward(batch | {"valid": torch.ones_like(batch["valid"])}, parts)


class PpoLearnsFromFinalRows(PPO):
    """Final observations count as transitions of their own."""

    def prepare(self, batch):
        valid = torch.ones_like(batch["valid"])
        valid[-1] = False
        return super().prepare(batch | {"valid": valid})


class DqnBootstrapsFromAnotherColumn(DQN):
    """The next observation is that of another sample."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"next_obs": rows["next_obs"].roll(1, 0)}


# ---- returns ---------------------------------------------------------------------------------------------------------


class DqnDiscountsTheFirstReward(DQN):
    """Returns off by one: the first reward is discounted, too."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"returns": rows["returns"] * self.cfg.gamma}


class SacDiscountsOnceLess(SAC):
    """Returns off by one: the bootstrap value is discounted once too little."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"discount": rows["discount"] / self.cfg.gamma}


class PpoShiftsRewards(PPO):
    """Returns off by one: a row has the reward of the row before."""

    def prepare(self, batch):
        return super().prepare(batch | {"reward": batch["reward"].roll(1, 0)})


class PpoForgetsGamma(PPO):
    """The discount is a number in the code."""

    def prepare(self, batch):
        rows, value = super().prepare(batch), self.values(batch)
        advantage, ret = gae(batch["reward"], value, batch["terminated"], batch["valid"], 0.99, self.cfg.lambda_)
        return rows | {"advantage": advantage, "returns": ret}


class IqlForgetsToBootstrap(IQL):
    """The target is the reward alone."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"discount": rows["discount"] * 0}


class A2cClipsRewards(A2C):
    """Rewards are clipped to their sign, as for Atari, whatever the settings say."""

    def prepare(self, batch):
        return super().prepare(batch | {"reward": batch["reward"].sign()})


# ---- targets and gradients -------------------------------------------------------------------------------------------


class DqnGradientsIntoTheTarget(DQN):
    """The target is computed by the online network, with its gradient."""

    def forward(self, batch, parts):
        out = self.online.head(self.online.torso(batch["obs"], {}, None)[0], noisy=False)
        future = self.online.head(self.online.torso(batch["next_obs"], {}, None)[0], noisy=False).amax(-1)
        error = batch["returns"] + batch["discount"] * future - gather_action(out, batch["action"])
        return Losses({"critic": 0.5 * error.square()}, feedback={"priority": error.detach().abs()})


class DqnNeverMovesTheTarget(DQN):
    """The target network stays as it was at the start."""

    def after_step(self, parts, losses, learner):
        pass


class DqnCopiesTheWrongWay(DQN):
    """The online network becomes a copy of the target network, and not the reverse."""

    def after_step(self, parts, losses, learner):
        if (learner.progress.updates + 1) % self.cfg.target_update_period == 0:
            self.online.load_state_dict(self.target.state_dict())


class PpoAscends(PPO):
    """The sign of the policy's loss is wrong."""

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses(losses.terms | {"policy": -losses.terms["policy"]})


class PpoInvertsTheRatio(PPO):
    """The ratio is that of the old policy to the new one."""

    def forward(self, batch, parts):
        dist, _ = self.net(batch, {})
        return super().forward(batch | {"logp": 2 * dist.logp(batch["action"]) - batch["logp"]}, parts)


class DdpgFollowsTheWrongSign(DDPG):
    """The policy goes where values are lower."""

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        if "actor" in parts:
            losses.terms["actor"] = -losses.terms["actor"]
        return losses


class BcImitatesTheNextAction(BC):
    """Observations and actions are a row apart."""

    def prepare(self, batch):
        return super().prepare(batch | {"action": batch["action"].roll(-1, 0)})


class DqnJudgesTheWrongAction(DQN):
    """The error is that of the best action, and not of the one that was played."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | {"action": rows["action"].roll(1, 0)}


class LinUcbKeepsRewards(LinUCB):
    """Every arm learns from every reward."""

    def rounds(self, batch):
        rows = super().rounds(batch)
        arms = torch.arange(len(rows), device=rows.device) % self.arms
        return torch.cat([arms[:, None].to(rows), rows[:, 1:]], 1)


# ---- weights, masks, memory ------------------------------------------------------------------------------------------


class DqnForgetsImportanceWeights(DQN):
    """Samples that were drawn by priority count alike."""

    def prepare(self, batch):
        return {key: leaf for key, leaf in super().prepare(batch).items() if key != "weight"}


class ImpalaForgetsImportanceWeights(IMPALA):
    """Learns from what older policies did as if the present one had done it."""

    def forward(self, batch, parts):
        logp = self.logp(batch).detach()
        return super().forward(batch | {"logp": logp}, parts)


class DqnActsOutsideTheMask(DQN):
    """The mask of allowed actions is ignored by what acts."""

    def act(self, step, carry, mode):
        return super().act({key: leaf for key, leaf in step.items() if key != "action_mask"}, carry, mode)


class DqnBootstrapsOutsideTheMask(DQN):
    """The mask of allowed actions is ignored in the target's maximum."""

    def prepare(self, batch):
        return {key: leaf for key, leaf in super().prepare(batch).items() if key != "next_action_mask"}


class DqnTakesTheMaskOfAnotherRow(DQN):
    """The target's maximum is over the actions that were allowed a row before."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | ({"next_action_mask": rows["action_mask"]} if "action_mask" in rows else {})


class DqnKeepsItsStateAtReset(DQN):
    """The recurrent state is not reset where an episode begins."""

    def act(self, step, carry, mode):
        return super().act(step | {"is_first": none(step["is_first"])}, carry, mode)

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | ({"is_first": none(rows["is_first"])} if "is_first" in rows else {})


class PpoForgetsItsState(PPO):
    """Acts with the recurrent state of an episode's beginning, in every row."""

    def act(self, step, carry, mode):
        out, after = super().act(step | {"is_first": torch.ones_like(step["is_first"])}, carry, mode)
        return out, after


class DqnLearnsWithoutItsState(DQN):
    """Every row of a sequence is learned from as if it were the first one."""

    def prepare(self, batch):
        rows = super().prepare(batch)
        return rows | ({"is_first": torch.ones_like(rows["is_first"])} if "is_first" in rows else {})

"""Fitted Q evaluation: Le et al. 2019 (arXiv:1903.08738), algorithm 3, with a network and a target network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, Learner, Losses, Optim, Trainable
from rlplug.config.schema import Estimate as Config
from rlplug.functional.targets import polyak_
from rlplug.nn import Adam, FeatureCritic, Flatten
from rlplug.types import Batch

AT_ONCE = 4096  # rows that are judged at a time


class FQE(Trainable):
    """Action values ``Q(s, a, t)`` of a policy that does not change, ``cfg.folds`` of them side by side.

    An episode ends where its recording does, also where it was truncated: what is learned is the return that an
    evaluation would count. So the step ``t`` is an input beside observation and action, in units of the longest episode.
    Values are learned in units of the mean absolute return.

    Args:
        unit: the mean absolute return.
    """

    def __init__(self, cfg: Config, ctx: Context, unit: float) -> None:
        super().__init__()
        group = ctx.spec.single_agent
        self.cfg, self.unit, self.flatten = cfg, unit or 1.0, Flatten(group.action)
        self.bounded = isinstance(group.action, Box) and group.action.is_bounded()
        torso = ctx.build("critic_model", group.obs, cfg.folds)
        self.critic = FeatureCritic(torso, self.flatten.size + 1, cfg.folds)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self._pairs = [list(net.parameters()) for net in (self.target, self.critic)]

    def optimizers(self) -> dict[str, Optim]:
        return {"critic": Optim(Adam(self.critic.parameters(), lr=self.cfg.lr))}

    def prepare(self, batch: Batch) -> Batch:
        """Compute the targets ``r_t + gamma sum_a pi(a | s_{t+1}) Q'(s_{t+1}, a, t+1)``, ``[folds, n]``."""
        next_value = self._mean(self.target, batch["next"])
        returns = batch["reward"] / self.unit + self.cfg.gamma * torch.where(batch["end"], 0.0, next_value)
        return batch | {"returns": returns}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Return the squared error of every model whose episodes these rows belong to: ``learns [folds, n]``."""
        error = self._q(self.critic, batch["obs"], batch["action"].unsqueeze(1), batch["time"]).squeeze(-1)
        error = (error - batch["returns"]).square()
        return Losses({"critic": torch.where(batch["learns"], error, 0.0).sum(0)})

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        polyak_(*self._pairs, self.cfg.tau)

    @torch.no_grad()
    def judge(self, rows: Batch) -> tuple[Tensor, Tensor]:
        """Return ``Q`` of the actions that were played and ``V`` of every model, ``[folds, rows]`` float64."""
        q, value = list[Tensor](), list[Tensor]()
        for begin in range(0, len(rows["time"]), AT_ONCE):
            part = tree.take(rows, slice(begin, begin + AT_ONCE))
            q.append(self._q(self.critic, part["obs"], part["action"].unsqueeze(1), part["time"]).squeeze(-1))
            value.append(self._mean(self.critic, part))
        return torch.cat(q, 1).double() * self.unit, torch.cat(value, 1).double() * self.unit

    def _mean(self, critic: FeatureCritic, rows: Batch) -> Tensor:
        """Return the mean ``[folds, n]`` of ``Q`` over the policy's actions ``choices [n, K, ...]``."""
        return (rows["probs"] * self._q(critic, rows["obs"], rows["choices"], rows["time"])).sum(-1)

    def _q(self, critic: FeatureCritic, obs: Any, actions: Tensor, time: Tensor) -> Tensor:
        """Return ``Q [folds, n, K]`` of ``actions [n, K, ...]`` and ``time [n]``."""
        actions = self.flatten(actions.clamp(-1.0, 1.0) if self.bounded else actions)  # as environments take them
        code = critic.encode(obs, {}, None)[0].unsqueeze(-2)
        code = code.expand(*code.shape[:-2], actions.shape[-2], code.shape[-1])
        return critic(code, torch.cat((actions, time[:, None, None].expand(*actions.shape[:-1], 1)), -1))


def fit(fqe: FQE, rows: Batch, learner: Learner, generator: torch.Generator) -> None:
    """Fit the models to rows of whole episodes, which follow each other.

    Args:
        rows: leaves ``[rows, ...]``: ``obs, action, reward, end, time, valid``; ``choices`` and ``probs`` of the policy;
            ``fold``, which model leaves the row's episode out.
        generator: draws the minibatches.
    """
    cfg, folds = fqe.cfg, torch.arange(fqe.cfg.folds, device=rows["fold"].device).unsqueeze(-1)
    begins = rows["valid"].nonzero().squeeze(-1)
    for _ in range(cfg.updates):
        drawn = torch.randint(len(begins), (cfg.batch_size,), generator=generator, device=generator.device)
        index = begins[drawn.to(begins.device)]
        batch = tree.take({key: rows[key] for key in ("obs", "action", "reward", "end", "time", "fold")}, index)
        batch["next"] = tree.take({key: rows[key] for key in ("obs", "choices", "probs", "time")}, index + 1)
        batch["learns"] = (batch["fold"] != folds) | (cfg.folds == 1)
        with torch.no_grad():
            batch = fqe.prepare(batch)
        learner.minimize(batch, fqe)

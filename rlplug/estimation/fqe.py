"""Fitted Q evaluation (FQE): Le et al. 2019 (arXiv:1903.08738), algorithm 3, with a network; and Q-regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, Learner, Losses, Optim, Trainable
from rlplug.config.schema import Estimate as Config
from rlplug.nn import Adam, FeatureCritic, Flatten, as_executed
from rlplug.types import Batch

AT_ONCE = 4096  # rows evaluated at a time


class FQE(Trainable):
    """Action values ``Q(s, a, t)`` of a fixed policy, as an ensemble of ``cfg.folds`` models.

    An episode ends with its last recorded row, also if it was truncated, so the models learn the return of an
    evaluation. If any episode was truncated, the step ``t``, in units of the longest episode, is an additional input.
    Values are learned in units of the mean absolute return.

    Args:
        slot: slot of the model that encodes observations.
        unit: mean absolute return.
    """

    def __init__(self, cfg: Config, ctx: Context, slot: str, unit: float) -> None:
        super().__init__()
        group = ctx.spec.single_agent
        self.cfg, self.unit, self.action, self.flatten = cfg, unit or 1.0, group.action, Flatten(group.action)
        torso = ctx.build(slot, group.obs, cfg.folds)
        self.critic = FeatureCritic(torso, self.flatten.size + 1, cfg.folds)
        self.lr = torch.tensor(cfg.lr)

    def optimizers(self) -> dict[str, Optim]:
        return {"critic": Optim(Adam(self.critic.parameters(), lr=self.lr), lr=self.lr)}

    @torch.no_grad()
    def backup(self, rows: Batch) -> Tensor:
        """Return ``r_t + gamma sum_a pi(a | s_{t+1}) Q(s_{t+1}, a, t+1)`` of rows with ``next``, ``[folds, n]``."""
        next_value = torch.where(rows["end"], 0.0, self._mean(rows["next"]))
        return rows["reward"] / self.unit + self.cfg.gamma * next_value

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Return the squared error of every model on the rows that it learns from, ``learns [folds, n]``."""
        error = self._q(batch["obs"], batch["action"].unsqueeze(1), batch["time"]).squeeze(-1)
        error = (error - batch["returns"]).square() * batch.get("weight", 1.0)
        return Losses({"critic": torch.where(batch["learns"], error, 0.0).sum(0)})

    @torch.no_grad()
    def judge(self, rows: Batch) -> tuple[Tensor, Tensor]:
        """Return ``Q`` of the recorded actions and ``V`` of every model, ``[folds, rows]`` float64."""
        q, value = list[Tensor](), list[Tensor]()
        for begin in range(0, len(rows["time"]), AT_ONCE):
            part = tree.take(rows, slice(begin, begin + AT_ONCE))
            q.append(self._q(part["obs"], part["action"].unsqueeze(1), part["time"]).squeeze(-1))
            value.append(self._mean(part))
        return torch.cat(q, 1).double() * self.unit, torch.cat(value, 1).double() * self.unit

    def _mean(self, rows: Batch) -> Tensor:
        """Return the mean ``[folds, n]`` of ``Q`` over the policy's actions ``choices [n, K, ...]``."""
        return (rows["probs"] * self._q(rows["obs"], rows["choices"], rows["time"])).sum(-1)

    def _q(self, obs: Any, actions: Tensor, time: Tensor) -> Tensor:
        """Return ``Q [folds, n, K]`` of ``actions [n, K, ...]`` and ``time [n]``."""
        actions = self.flatten(as_executed(self.action, actions))
        code = self.critic.encode(obs, {}, None)[0].unsqueeze(-2)
        code = code.expand(*code.shape[:-2], actions.shape[-2], code.shape[-1])
        return self.critic(code, torch.cat((actions, time[:, None, None].expand(*actions.shape[:-1], 1)), -1))


def fit(fqe: FQE, rows: Batch, learner: Learner, generator: torch.Generator) -> None:
    """Fit the models to rows of concatenated whole episodes.

    The first quarter of the iterations fits recorded returns, which are the behavior policy's action values; each other
    iteration fits a one-step backup of the previous models. With ``weight``, all iterations fit the returns, by the
    weighted squared error. The step size decays to zero.

    Args:
        rows: leaves ``[rows, ...]``: ``obs, action, reward, end, time, valid``; ``followed``, the return from the row
            on; ``choices`` and ``probs`` of the policy; ``fold``, the model that holds out the row's episode;
            ``weight`` of the row, only for a regression.
        generator: draws the minibatches.
    """
    cfg, device = fqe.cfg, rows["fold"].device
    begins, folds = rows["valid"].nonzero().squeeze(-1), torch.arange(cfg.folds, device=device).unsqueeze(-1)
    keys = ("obs", "action", "reward", "end", "time", "fold", "followed", "weight")
    own = {key: rows[key] for key in keys if key in rows}
    following = {key: rows[key] for key in ("obs", "choices", "probs", "time")}
    for i in range(cfg.iterations):
        fqe.lr.fill_(cfg.lr * (1 - i / cfg.iterations))
        index = begins[torch.randint(len(begins), (cfg.updates * cfg.batch_size,), generator=generator, device=device)]
        batch = tree.take(own, index)
        if i < cfg.iterations // 4 or "weight" in rows:
            targets = (batch["followed"] / fqe.unit).expand(cfg.folds, -1)
        else:
            targets = fqe.backup(batch | {"next": tree.take(following, index + 1)})
        learns = (batch["fold"] != folds) | (cfg.folds == 1)
        for begin in range(0, len(index), cfg.batch_size):
            part = slice(begin, begin + cfg.batch_size)
            models = {"returns": targets[:, part], "learns": learns[:, part]}
            learner.minimize(tree.take(batch, part) | models, fqe)

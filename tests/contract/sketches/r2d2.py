# pyright: strict
"""R2D2: Recurrent Experience Replay in Distributed Reinforcement Learning, Kapturowski et al., ICLR 2019.

Rows of a sample, R = burn_in + L + n + 1: warm up, learn, look n steps ahead, bootstrap.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from rlplug import tree
from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


def rescale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h(x), section 2.3."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x


def unscale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """The inverse of ``rescale``."""
    root = (1 + 4 * eps * (x.abs() + 1 + eps)).sqrt()
    return x.sign() * (((root - 1) / (2 * eps)).square() - 1)


class QNetwork(nn.Module):
    def __init__(self, ctx: Context, inputs: Dict, actions: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build("model", inputs)
        self.head = nn.Linear(self.torso.out_dim, actions)

    def forward(self, rows: Batch, carry: Batch) -> tuple[Tensor, Batch]:
        """Q of every action, ``[B, A]`` or ``[T, B, A]``; -inf where the action is not allowed."""
        x = {key: rows[key] for key in ("obs", "prev_action", "prev_reward")}
        features, carry = self.torso(x, carry, rows["is_first"])
        q: Tensor = self.head(features)
        return (q.masked_fill(~rows["action_mask"], -torch.inf) if "action_mask" in rows else q), carry


class R2D2(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: PositiveInt = option("Rewards in the target before it bootstraps.")
        sequence: PositiveInt = option("Rows of a sample that are learnt from: L.")
        stride: PositiveInt = option("Rows between the beginnings of two samples.")
        burn_in: NonNegativeInt = option("Rows before them that only warm up the recurrent state.")
        beta: Scheduled[UnitFloat] = option("Exponent of the importance weights.")
        eta: UnitFloat = option("Share of the maximum in a sequence's priority.")
        lr: PositiveFloat = option("Adam's step size.")
        target_update: PositiveInt = option("Updates between two copies to the target network.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        self.actions = int(group.action.n)
        inputs = Dict(obs=group.obs, prev_action=group.action, prev_reward=Box(-torch.inf, torch.inf, ()))
        self.online = QNetwork(ctx, inputs, self.actions)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.beta = ctx.schedule(cfg.beta)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(spec.single_agent.action, Discrete):
            raise ConfigError("algo.name", "r2d2 needs discrete actions")
        keys = (
            "obs",
            "prev_action",
            "prev_reward",
            "action_mask",
            "action",
            "reward",
            "terminated",
            "truncated",
            "carry",
        )
        window = cfg.sequence + cfg.n_step
        return Needs(
            Window(window, cfg.burn_in, cfg.stride), data="windows", off_policy=True, perturbable=True, keys=keys
        )

    def initial_carry(self, n: int) -> Batch:
        return self.online.torso.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        q, carry = self.online(step, carry)
        if mode == "random":
            q = self.ctx.rand(*q.shape).masked_fill(q.isneginf(), -1.0)
        return {"action": q.argmax(-1)}, carry  # epsilon-greedy is an Exploration's perturb

    def prepare(self, batch: Batch) -> Batch:
        """n-step returns that stop at the end of an episode, and the row each one bootstraps from, ``[R, B]``."""
        cfg, valid, over = self.cfg, batch["valid"].clone(), batch["terminated"] | batch["truncated"]
        rows = len(valid)
        ret, discount = torch.zeros_like(batch["reward"]), torch.ones_like(batch["reward"])
        at, running = torch.arange(rows)[:, None].expand_as(valid).clone(), valid.clone()
        for _ in range(cfg.n_step):
            here = at.clamp(max=rows - 1)
            ret += torch.where(running, discount * batch["reward"].gather(0, here), 0.0)
            at += running
            discount *= torch.where(running, cfg.gamma * (~batch["terminated"].gather(0, here)), 1.0)
            running &= ~over.gather(0, here)
        valid[: cfg.burn_in], valid[cfg.burn_in + cfg.sequence :] = False, False
        return batch | {"returns": ret, "discount": discount, "bootstrap": at.clamp(max=rows - 1), "valid": valid}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        weight = batch["sample_prob"] ** -self.beta  # the buffer's size cancels in the quotient
        return learner.minimize(batch | {"weight": weight / learner.reduce(weight, "max")}, self)

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        burn, end = self.cfg.burn_in, self.cfg.burn_in + self.cfg.sequence
        seen = {
            key: batch[key] for key in ("obs", "prev_action", "prev_reward", "is_first", "action_mask") if key in batch
        }
        warm, live = tree.map(lambda x: x[:burn], seen), tree.map(lambda x: x[burn:], seen)
        carry = target_carry = tree.map(lambda x: x[0], batch["carry"])  # [K, B, ...]: before row 0
        with torch.no_grad():
            if burn:
                carry, target_carry = self.online(warm, carry)[1], self.target(warm, carry)[1]
            target_q: Tensor = self.target(live, target_carry)[0]
        q: Tensor = self.online(live, carry)[0]  # [L + n + 1, B, A]
        best = q.detach().argmax(-1, keepdim=True)
        bootstrap = unscale(target_q.gather(-1, best).squeeze(-1)).gather(0, batch["bootstrap"][burn:end] - burn)
        goal = rescale(batch["returns"][burn:end] + batch["discount"][burn:end] * bootstrap)
        chosen = one_hot(batch["action"][burn:end], self.actions).bool()
        td = q[: end - burn].masked_fill(~chosen, 0.0).sum(-1) - goal  # [L, B]
        whole = pad(td, (0, 0, burn, len(batch["valid"]) - end))  # [R, B]: terms have the rows of ``valid``
        error = whole.detach().abs() * batch["valid"]
        mean = error.sum(0) / batch["valid"].sum(0).clamp(min=1)
        priority = self.cfg.eta * error.amax(0) + (1 - self.cfg.eta) * mean
        return Losses({"td": batch["weight"] * whole.square()}, {"priority": priority.mean()}, {"priority": priority})

    def optimizers(self) -> dict[str, Optim]:
        return {"q": Optim(torch.optim.Adam(self.online.parameters(), lr=self.cfg.lr), grad_clip=40.0)}

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if learner.progress.updates % self.cfg.target_update == 0:
            self.target.load_state_dict(self.online.state_dict())

    def actor_keys(self) -> tuple[str, ...]:
        names: dict[str, Any] = self.state_dict()
        return tuple(name for name in names if name.startswith("online."))

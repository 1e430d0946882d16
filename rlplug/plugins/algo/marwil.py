"""Behavioral cloning (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88), and monotonic advantage re-weighted imitation
learning, MARWIL: Wang et al. 2018 (NeurIPS, "Exponentially Weighted Imitation Learning for Batched Historical Data").

BC maximizes the likelihood of recorded actions. MARWIL weights them by their advantage; ``beta`` 0 gives BC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.imitation import advantage_weight, log_likelihood
from rlplug.functional.returns import gae
from rlplug.nn import Adam, Distribution, Linear, Policy, precise
from rlplug.settings import (
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, EnvSpec, Mode


class BC(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        sgd_minibatch_size: PositiveInt = option("Rows per gradient step, over all ranks.")
        bc_logstd_coeff: NonNegativeFloat = option("Weight of the mean log standard deviation of Gaussian actions.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        return Needs(data="episodes", off_policy=True, rewards=False, keys=("obs", "action", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, keys=(*needs.keys, "is_first"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.net = Policy(ctx.build("model", group.obs), group.action, cfg)
        self.lr = ctx.schedule(cfg.lr)

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.parameters(), lr=self.lr)
        return {"policy": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, self.net.initial_carry(batch["valid"].shape[1]))[0]

    def prepare(self, batch: Batch) -> Batch:
        """Select the rows to imitate."""
        return {key: batch[key] for key in ("obs", "action", "action_mask", "is_first", "valid") if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Minimize ``-log pi(a_t | s_t)``."""
        carry = self.net.initial_carry(batch["valid"].shape[1]) if "valid" in batch else {}
        dist, _ = self.net.dist(batch, carry)
        term = -log_likelihood(dist, batch["action"], self.cfg.bc_logstd_coeff)

        def diagnostics() -> dict[str, Tensor]:
            return {"mean_entropy": dist.entropy()}

        return Losses({"policy": term}, diagnostics=diagnostics)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Train for one epoch on the sampled episodes: on shuffled rows, or on whole episodes if it is recurrent."""
        losses, size, recurrent = Losses({}), self.cfg.sgd_minibatch_size, bool(self.initial_carry(1))
        if recurrent:
            size = max(1, round(size / len(batch["valid"])))
        for minibatch in learner.minibatches(batch, size, "column" if recurrent else "row"):
            losses = learner.minimize(minibatch, self)
        return losses


class MARWIL(BC):
    traceable = True

    @settings
    class Config(BC.Config):
        gamma: UnitFloat = option("Discount factor.")
        beta: NonNegativeFloat = option(
            "Inverse temperature of the advantages; 0: behavioral cloning, without a value function."
        )
        max_weight: PositiveFloat | None = option("Maximum weight of a dataset action; null: off.")
        vf_coeff: NonNegativeFloat = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        moving_average_sqd_adv_norm_start: PositiveFloat = option("Initial mean of squared advantages.")
        moving_average_sqd_adv_norm_update_rate: UnitFloat = option("Update rate of that mean per gradient step.")

    cfg: Config

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        return replace(super().needs(cfg, spec), rewards=cfg.beta > 0)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg, ctx)
        self.value_torso: nn.Module | None = None
        self.value: nn.Module | None = None
        if cfg.beta:
            torso = self.net.torso
            if not cfg.vf_share_layers:
                torso = self.value_torso = ctx.build("critic_model", ctx.spec.single_agent.obs)
            self.value = Linear(torso.out_dim, 1, gain=1.0)
        self.sqd_adv_norm: Tensor
        self.register_buffer("sqd_adv_norm", torch.tensor(cfg.moving_average_sqd_adv_norm_start))

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("net."))

    def values(self, batch: Batch) -> Tensor:
        if self.value is None:
            return super().values(batch)
        torso: Any = self.net.torso if self.value_torso is None else self.value_torso
        columns = batch["valid"].shape[1] if "valid" in batch else 0
        features, _ = torso(batch["obs"], torso.initial_carry(columns), batch.get("is_first"))
        return precise(self.value, features).squeeze(-1)

    def prepare(self, batch: Batch) -> Batch:
        """Compute the returns of whole episodes; truncated ones bootstrap from the value of their final observation."""
        rows = super().prepare(batch)
        if self.cfg.beta:
            stream = batch["reward"], self.values(batch), batch["terminated"], batch["valid"]
            rows["returns"] = gae(*stream, self.cfg.gamma, 1.0)[1]
        return rows

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Minimize ``-exp(beta A / c) log pi(a | s)``, the paper's algorithm 1, and the value loss."""
        cfg, losses = self.cfg, super().forward(batch, parts)
        if not cfg.beta:
            return losses
        value = self.values(batch)
        advantage = (batch["returns"] - value).detach()
        weight = advantage_weight(advantage, self.sqd_adv_norm, cfg.beta, cfg.max_weight)
        terms = {
            "policy": weight * losses.terms["policy"],
            "value": 0.5 * cfg.vf_coeff * (value - batch["returns"]).square(),
        }
        cloning: Any = losses.diagnostics

        def diagnostics() -> dict[str, Tensor]:
            return cloning() | {"advantage": advantage, "weight": weight}

        return Losses(terms, {"sqd_advantage": advantage.square()}, diagnostics=diagnostics)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        """Update the mean of squared advantages ``c^2``, which normalizes the next gradient step's advantages."""
        if self.cfg.beta:
            rate = self.cfg.moving_average_sqd_adv_norm_update_rate
            self.sqd_adv_norm.lerp_(losses.metrics["sqd_advantage"], rate)

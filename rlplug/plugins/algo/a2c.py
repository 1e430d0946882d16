"""Advantage actor-critic, Mnih et al. 2016 (arXiv:1602.01783), synchronously: A2C.

Every rollout gives one gradient step, with the weights that acted. So one pass over the rows, in ``forward``,
computes values, advantages and gradients, and a recurrent model is unrolled from the state before row 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim, Window
from rlplug.functional.minibatches import microbatches
from rlplug.functional.returns import gae
from rlplug.functional.sequences import carry_before
from rlplug.nn import ActorCritic, Distribution, Policy, adam_or_rmsprop
from rlplug.nn.actor_critic import require_critic
from rlplug.settings import NonNegativeFloat, PolicyOptions, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, EnvSpec, Mode


class A2C(Algorithm):
    traceable = True

    @settings
    class Config(PolicyOptions):
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda; 1: n-step returns up to the end of the rollout.")
        lr: Scheduled[NonNegativeFloat] = option("Step size.")
        critic_lr: Scheduled[NonNegativeFloat] | None = option("Step size of the value; null: one optimizer for both.")
        opt_type: Literal["adam", "rmsprop"] = option("Optimizer.")
        epsilon: PositiveFloat = option("The optimizer's epsilon, added outside the square root.")
        decay: UnitFloat = option("RMSProp: decay of the mean of squared gradients.")
        vf_loss_coeff: Scheduled[NonNegativeFloat] = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        use_critic: bool = option("Learn a value; false: advantages are discounted returns, with lambda_=1.")
        entropy_coeff: Scheduled[NonNegativeFloat] = option("Weight of the entropy bonus.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        require_critic(cfg.use_critic, cfg.lambda_, cfg.critic_lr)
        return Needs(data="rollout", keys=("obs", "action", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, window=Window(stride=1), keys=(*needs.keys, "is_first", "carry"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        if cfg.use_critic:
            self.net: Policy = ActorCritic.of_run(ctx, cfg.vf_share_layers, cfg)
        else:
            self.net = Policy(ctx.build("model", ctx.spec.single_agent.obs), ctx.spec.single_agent.action, cfg)
        self.lr = ctx.schedule(cfg.lr)
        self.critic_lr = None if cfg.critic_lr is None else ctx.schedule(cfg.critic_lr)
        self.vf_loss_coeff, self.entropy_coeff = ctx.schedule(cfg.vf_loss_coeff), ctx.schedule(cfg.entropy_coeff)

    def optimizers(self) -> dict[str, Optim]:
        cfg, found = self.cfg, dict[str, Optim]()
        for name, (own, lr) in self.net.parts(self.lr, self.critic_lr).items():
            optimizer = adam_or_rmsprop(cfg.opt_type, own, lr, cfg.epsilon, cfg.decay)
            found[name] = Optim(optimizer, cfg.grad_clip, cfg.grad_clip_by, lr=lr)
        return found

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def distribution(self, batch: Batch) -> Distribution:
        return self.net.dist(batch, carry_before(batch))[0]

    def values(self, batch: Batch) -> Tensor:
        return self.net.values(batch, carry_before(batch))

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of algorithm S3: the policy's, with its entropy bonus, and the value's."""
        cfg = self.cfg
        if cfg.use_critic:
            dist, value = self.net(batch, carry_before(batch))
        else:
            dist, value = self.distribution(batch), torch.zeros_like(batch["reward"])
        with torch.no_grad():
            rows = batch["reward"], value, batch["terminated"], batch["valid"]
            advantage, returns = gae(*rows, cfg.gamma, cfg.lambda_)
        terms = {"policy": -dist.logp(batch["action"]) * advantage}
        if cfg.use_critic:
            terms["value"] = self.vf_loss_coeff * (value - returns).square()
        entropy = dist.entropy()
        if cfg.entropy_coeff:
            terms["entropy"] = -self.entropy_coeff * entropy
        return Losses(terms, {"mean_entropy": entropy.detach(), "advantage": advantage})


class A3C(A2C):
    """A2C's losses; every actor computes gradients on its own segments, and they are applied asynchronously.

    A gradient covers ``train_batch_size`` transitions of the run: some columns of a segment, or several segments.
    """

    @classmethod
    def needs(cls, cfg: A2C.Config, spec: EnvSpec) -> Needs:
        return replace(super().needs(cfg, spec), data="segments", gradients=True)

    def _count(self, valid: Tensor) -> int:
        """Return the number of gradients of the transitions ``valid [T+1, B]``."""
        ctx, (rows, columns) = self.ctx, valid.shape
        ranks = 1 if ctx.num_envs % ctx.world_size else ctx.world_size  # otherwise one rank collects for all
        return max(1, (rows - 1) * columns * ranks // ctx.batch_size)

    def annotate(self, batch: Batch) -> Batch:
        """Add the sums over valid rows of gradients and losses; leaves ``[1, n, ...]`` of ``n`` gradients."""
        with torch.inference_mode(False), torch.enable_grad():
            parts = microbatches(tree.map(torch.clone, batch), self._count(batch["valid"]))
            sums = [self._sums(part) for part in parts]
        return {"gradients": tree.map(lambda *each: torch.stack(each)[None], *sums)}

    def _sums(self, batch: Batch) -> Batch:
        losses, params = self.forward(batch, ()), self._learned()
        sums = tree.map(lambda x: torch.where(batch["valid"], x, 0.0).sum(), losses.terms | losses.metrics)
        total: Any = sum(sums[name] for name in losses.terms)
        given = torch.autograd.grad(total, [*params.values()], allow_unused=True, materialize_grads=True)
        return {"parameters": dict(zip(params, given, strict=True)), "losses": tree.map(torch.detach, sums)}

    def _learned(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Take one step per gradient; without gradients, A2C's step."""
        if "gradients" not in batch:
            return super().update(batch, learner)
        losses, count, gradients = Losses({}), self._count(batch["valid"]), batch["gradients"]
        rows = {key: x for key, x in batch.items() if key != "gradients"}
        for i, part in enumerate(microbatches(rows, count)):
            own = tree.map(lambda x: x.chunk(count, 1)[i], gradients)  # noqa: B023
            losses = learner.minimize(part | {"gradients": own}, self)
        return losses

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Return received losses; the policy's is a linear function of the weights that has the received gradient."""
        if "gradients" not in batch:
            return super().forward(batch, parts)
        count = batch["valid"].sum().clamp(min=1)
        means = tree.map(lambda x: x.sum((0, 1)) / count, batch["gradients"])
        linear = torch.stack([(p * means["parameters"][name]).sum() for name, p in self._learned().items()]).sum()
        return Losses({"policy": means["losses"].pop("policy") + linear - linear.detach()}, means["losses"])

"""Behavioral cloning (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88): maximum likelihood of recorded actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.imitation import log_likelihood
from rlplug.nn import Adam, Policy
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, option, settings
from rlplug.types import Batch, EnvSpec, Mode


class BC(Algorithm):
    @settings
    class Config:
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        sgd_minibatch_size: PositiveInt = option("Rows per gradient step, over all ranks.")
        bc_logstd_coeff: NonNegativeFloat = option("Weight of the mean log standard deviation of Gaussian actions.")
        grad_clip: PositiveFloat | None = option("Limit of the gradient; null: off.")
        grad_clip_by: Clip = option("value, norm (every tensor by itself) or global_norm.")
        initial_log_std: float = option("Log standard deviation of Gaussian actions at the start.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        spec.single_agent  # noqa: B018  raises for several agents
        return Needs(data="episodes", off_policy=True, keys=("obs", "action", "action_mask"))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(needs, keys=(*needs.keys, "is_first"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.net = Policy(ctx.build("model", group.obs), group.action, cfg.initial_log_std)
        self.lr = ctx.schedule(cfg.lr)

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.net.parameters(), lr=self.lr)
        return {"policy": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def initial_carry(self, n: int) -> Batch:
        return self.net.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.net.act(step, carry, mode, self.ctx)

    def logp(self, batch: Batch) -> Tensor:
        return self.net.dist(batch, self.net.initial_carry(batch["valid"].shape[1]))[0].logp(batch["action"])

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Minimize ``-log pi(a_t | s_t)``."""
        carry = self.net.initial_carry(batch["valid"].shape[1]) if "valid" in batch else {}
        dist, _ = self.net.dist(batch, carry)
        term = -log_likelihood(dist, batch["action"], self.cfg.bc_logstd_coeff)

        def diagnostics() -> dict[str, Tensor]:
            return {"mean_entropy": dist.entropy()}

        return Losses({"policy": term}, diagnostics=diagnostics)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Make one epoch over the sampled episodes: of rows in any order, or of whole episodes if it is recurrent."""
        losses, size, recurrent = Losses({}), self.cfg.sgd_minibatch_size, bool(self.initial_carry(1))
        rows = {key: batch[key] for key in ("obs", "action", "action_mask", "is_first", "valid") if key in batch}
        if recurrent:
            size = max(1, round(size / len(batch["valid"])))
        for minibatch in learner.minibatches(rows, size, "column" if recurrent else "row"):
            losses = learner.minimize(minibatch, self)
        return losses

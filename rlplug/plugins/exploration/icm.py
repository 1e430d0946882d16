"""Intrinsic Curiosity Module, Pathak et al. 2017 (arXiv:1705.05363)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import nn
from rlplug.api import Context, Losses
from rlplug.functional.curiosity import prediction_error
from rlplug.nn import Activation, Flatten, Linear, as_executed, head_for, precise
from rlplug.plugins.exploration.curiosity import Curiosity, network
from rlplug.settings import ModelNode, NonNegativeFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch


class ICM(Curiosity):
    """Rewards transitions by the prediction error of a forward model, in features trained by an inverse model."""

    traceable = True

    @settings
    class Config:
        eta: Scheduled[NonNegativeFloat] = option("Factor of the intrinsic reward.")
        beta: UnitFloat = option("Weight of the forward loss; the inverse loss has 1 - beta.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        feature_dim: PositiveInt = option("Size of the features.")
        feature: ModelNode = option("Network before the linear layer of the features.")
        inverse_net_hiddens: list[PositiveInt] = option("Hidden layers of the inverse model.")
        inverse_net_activation: Activation = option("Nonlinearity of the inverse model.")
        forward_net_hiddens: list[PositiveInt] = option("Hidden layers of the forward model.")
        forward_net_activation: Activation = option("Nonlinearity of the forward model.")
        num_sgd_iter: PositiveInt = option("Epochs over each sample.")
        sgd_minibatch_size: PositiveInt | None = option(
            "Rows per gradient step, over all ranks; null: the whole sample."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        obs, self.space = ctx.spec.single_agent.obs, ctx.spec.single_agent.action
        self.cfg, dim = cfg, cfg.feature_dim
        self.eta, self.lr = ctx.schedule(cfg.eta), ctx.schedule(cfg.lr)
        self.flatten = Flatten(self.space)
        self.torso = network(ctx, cfg.feature, obs, "exploration.icm.feature")
        self.feature = Linear(self.torso.out_dim, dim)
        self.inverse_net = nn.MLP(2 * dim, cfg.inverse_net_hiddens, cfg.inverse_net_activation)
        size = self.inverse_net.out_dim
        continuous = isinstance(self.space, spaces.Box)
        self.inverse = Linear(size, self.flatten.size) if continuous else head_for(self.space, size, gain=None)
        self.forward_net = nn.MLP(dim + self.flatten.size, cfg.forward_net_hiddens, cfg.forward_net_activation)
        self.predict = Linear(self.forward_net.out_dim, dim)

    def features(self, obs: Any) -> Tensor:
        """Return ``phi [..., feature_dim]``."""
        return precise(self.feature, self.torso(obs, {}, None)[0])

    def forward_error(self, phi: Tensor, next_phi: Tensor, action: Tensor) -> Tensor:
        """Compute equation 5."""
        return prediction_error(
            precise(self.predict, self.forward_net(torch.cat((phi, self._flat(action)), -1))), next_phi
        )

    def inverse_error(self, phi: Tensor, next_phi: Tensor, action: Tensor) -> Tensor:
        """Compute equation 3, the action's negative log-likelihood.

        For continuous actions, the variance is 1, and the result is up to a constant. In hybrid actions, the continuous
        part is Gaussian with a learned variance.
        """
        code = self.inverse_net(torch.cat((phi, next_phi), -1))
        if isinstance(self.space, spaces.Box):
            return prediction_error(precise(self.inverse, code), self._flat(action))
        return -cast(Any, self.inverse(code)).logp(as_executed(self.space, action))

    def _flat(self, action: Tensor) -> Tensor:
        """Return the executed action: one-hot, or clipped to its bounds."""
        return self.flatten(as_executed(self.space, action))

    def encoded(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of both observations, and the action, of transitions ``[T, B]`` or flat rows ``[B]``."""
        phi = self.features(batch["obs"])
        if "next_obs" in batch:
            return phi, self.features(batch["next_obs"]), batch["action"]
        return phi[:-1], phi[1:], batch["action"][:-1]

    def bonus(self, batch: Batch) -> Tensor:
        """Compute equation 6."""
        return self.eta * self.forward_error(*self.encoded(batch))

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute equation 7 without the policy's term, which the algorithm computes."""
        rows, weight, beta = self.encoded(batch), batch.get("weight", 1.0), self.cfg.beta
        return Losses(
            {
                "inverse": (1.0 - beta) * weight * self.inverse_error(*rows),
                "forward": beta * weight * self.forward_error(*rows),
            }
        )

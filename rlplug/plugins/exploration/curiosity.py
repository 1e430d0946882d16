"""Base of modules whose intrinsic reward is a prediction error."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlplug import tree
from rlplug.api import Context, Exploration, Learner, Losses, Model, Optim
from rlplug.nn import Adam
from rlplug.types import Batch, ConfigError, EnvSpec


class Curiosity(Exploration):
    """Rewards transitions between rows t and t + 1 of the unshuffled sample, and trains on the same sample.

    ``cfg`` must have ``num_sgd_iter`` and ``sgd_minibatch_size``.
    """

    cfg: Any
    lr: Tensor

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        return "obs", "action"

    @abstractmethod
    def bonus(self, batch: Batch) -> Tensor:
        """Return the intrinsic reward ``[T, B]`` of a sample's transitions."""

    def optimizers(self) -> dict[str, Optim]:
        learned = [p for p in self.parameters() if p.requires_grad]
        return {"predictor": Optim(Adam(learned, lr=self.lr), lr=self.lr)}

    @torch.no_grad()
    def intrinsic_reward(self, batch: Batch) -> Tensor:
        """Return the bonus, 0 on rows that begin no transition: final observations and row T."""
        return pad(torch.where(batch["valid"][:-1], self.bonus(batch), 0.0), (0, 0, 0, 1))

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Train for ``num_sgd_iter`` epochs on the sample; minibatches are flat, and have ``next_obs``.

        With prioritized sampling, importance weights apply, so the predictor does not depend on the buffer's
        distribution.
        """
        rows = {key: batch[key] for key in ("obs", "action", "weight") if key in batch}
        rows["valid"], size = self.chosen(batch), self.cfg.sgd_minibatch_size
        if size is not None:
            rows |= {"next_obs": tree.map(lambda x: torch.cat((x[1:], x[-1:])), batch["obs"])}
            rows |= {"weight": batch["weight"].expand(rows["valid"].shape)} if "weight" in batch else {}
        losses = Losses({})
        for _ in range(self.cfg.num_sgd_iter):
            for part in [rows] if size is None else learner.minibatches(rows, size, "row"):
                losses = learner.minimize(part, self)
        return losses

    def chosen(self, batch: Batch) -> Tensor:
        """Return the rows of a sample to train on, ``[T+1, B]``: at most those that begin a transition."""
        return torch.cat((batch["valid"][:-1], torch.zeros_like(batch["valid"][:1])))


def next_obs(batch: Batch) -> Any:
    """Return the next observations of transitions: ``[T, B]`` of a sample, ``[B]`` of flat rows."""
    return batch["next_obs"] if "next_obs" in batch else tree.take(batch["obs"], slice(1, None))


def network(ctx: Context, node: Any, space: Any, key: str) -> Model:
    """Make the network that an option selects.

    Raises:
        ConfigError: it is recurrent; only single observations are supported.
    """
    model = ctx.build(node, space)
    if model.recurrent:
        raise ConfigError(key, f"{type(model).__name__} is recurrent, but single observations are compared; use mlp")
    return model

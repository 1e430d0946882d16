"""What modules have in common that reward what they predict badly."""

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
    """Rewards transitions by rows t and t + 1 of the unshuffled sample, and is trained on that sample as it came.

    ``cfg`` has ``num_sgd_iter`` and ``sgd_minibatch_size``.
    """

    cfg: Any
    lr: Tensor

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        return "obs", "action"

    @abstractmethod
    def bonus(self, batch: Batch) -> Tensor:
        """Intrinsic reward ``[T, B]`` of a sample's transitions."""

    def optimizers(self) -> dict[str, Optim]:
        learned = [p for p in self.parameters() if p.requires_grad]
        return {"predictor": Optim(Adam(learned, lr=self.lr), lr=self.lr)}

    @torch.no_grad()
    def intrinsic_reward(self, batch: Batch) -> Tensor:
        """Zero where a row begins no transition, as on final observations and row T."""
        return pad(torch.where(batch["valid"][:-1], self.bonus(batch), 0.0), (0, 0, 0, 1))

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Epochs over the sample; minibatches are flat, and have ``next_obs``.

        Where the sample was drawn by priority its importance weights count here too: what is predicted well does not
        depend on how a buffer draws.
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
        """Which rows of a sample it is trained on, ``[T+1, B]``: at most those that begin a transition."""
        return torch.cat((batch["valid"][:-1], torch.zeros_like(batch["valid"][:1])))


def next_obs(batch: Batch) -> Any:
    """The observations that transitions lead to: of a sample ``[T, B]``, of flat rows ``[B]``."""
    return batch["next_obs"] if "next_obs" in batch else tree.take(batch["obs"], slice(1, None))


def network(ctx: Context, node: Any, space: Any, key: str) -> Model:
    """The network of an option.

    Raises:
        ConfigError: it is recurrent; single observations are looked at here.
    """
    model = ctx.build(node, space)
    if model.recurrent:
        raise ConfigError(key, f"{type(model).__name__} is recurrent, but single observations are compared; take mlp")
    return model

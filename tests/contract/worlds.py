"""A model, a context, a learner, and random streams, to compute gradients without a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlplug.api import Algorithm, Context, Model, Trainable
from rlplug.config import Chosen
from rlplug.context import RunContext
from rlplug.distributed.fabric import one_rank
from rlplug.trainer.learner import RankLearner
from rlplug.types import Batch, EnvSpec


def chosen(cls: type[Any], cfg: Any = None, kind: Any = "model") -> Chosen:
    return Chosen(kind, kind, cls.__name__, cls, cfg)


def context(spec: EnvSpec, model: type[Model], **options: Any) -> RunContext:
    torch.manual_seed(0)
    return RunContext(spec=spec, slots={"model": chosen(model)}, **options)


def gradients(learner: RankLearner, batch: Batch, who: Trainable) -> dict[str, Tensor]:
    """The gradients with which ``minimize`` would step, by parameter."""
    learner.steps.compute(batch, who, tuple(learner.parts(who)))
    return {name: p.grad.clone() for name, p in who.named_parameters() if p.grad is not None}


def flat(space: spaces.Space[Any], x: Any) -> Tensor:
    """``[..., F]`` from a leaf of ``space``, or from a dict of them."""
    if isinstance(space, spaces.Dict):
        return torch.cat([flat(inner, x[key]) for key, inner in space.items()], -1)
    if isinstance(space, spaces.Discrete):
        return one_hot(x, int(space.n)).float()
    return x if space.shape else x.unsqueeze(-1)


class Layer(Model):
    """A model without memory."""

    out_dim = 8

    def __init__(self, cfg: Any, ctx: Context) -> None:
        super().__init__()
        assert ctx.space is not None
        self.space = ctx.space
        self.linear = nn.Linear(spaces.flatdim(ctx.space), self.out_dim)

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        return torch.tanh(self.linear(flat(self.space, x))), carry


def stream(rows: int, columns: int, seed: int = 0) -> Batch:
    """``[rows, columns]`` of a random stream whose episodes end both ways; row 0 begins a transition."""
    g = torch.Generator().manual_seed(seed)
    over, dies = (torch.rand(2, rows, columns, generator=g) < torch.tensor([0.3, 0.5])[:, None, None]).unbind()
    valid, first = torch.ones(rows, columns, dtype=torch.bool), torch.zeros(rows, columns, dtype=torch.bool)
    for t in range(rows - 1):
        valid[t + 1], first[t + 1] = ~(valid[t] & over[t]), ~valid[t]
    over &= valid
    reward = torch.randn(rows, columns, generator=g)
    valid[-1] = False
    return {
        "obs": torch.randn(rows, columns, 3, generator=g),
        "action": torch.randint(2, (rows, columns), generator=g),
        "reward": reward,
        "terminated": over & dies,
        "truncated": over & ~dies,
        "is_first": first,
        "valid": valid,
        "prev_action": torch.randint(2, (rows, columns), generator=g) * ~first,
        "prev_reward": reward.roll(1, 0) * ~first,
    }


def learner(ctx: RunContext, algorithm: Algorithm, microbatches: int = 1) -> RankLearner:
    none: Any = None
    return RankLearner(fabric=one_rank(), ctx=ctx, algorithm=algorithm, buffer=none, microbatches=microbatches)


def box(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)

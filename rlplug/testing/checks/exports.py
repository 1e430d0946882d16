"""Checks of exports: the greedy policy, and the features of a model, as programs of ``torch.export``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.export import Dim

from rlplug import tree
from rlplug.envs.spaces import joined
from rlplug.results.export import reason_of, traced
from rlplug.results.export_policy import NEXT, Policy, flat
from rlplug.testing.checks.runs import COLUMNS, Case, answers, episodes, require
from rlplug.types import Batch, ConfigError

ROWS = 4
"""rows compared: enough for a carry to go through several steps"""
TOLERANCE = 1e-5


def check_export(case: Case) -> None:
    """Check that the greedy policy can be exported, and that the export acts as ``act`` does, for one agent.

    A policy that plans through a simulator may be one that cannot be exported.
    """
    trainer = case.build()
    ctx = trainer.ctx
    if ctx.needs.simulates or ctx.spec.has_agents or not trainer.config.env.cls.traits.playable:
        trainer.close()
        return
    rows = episodes(trainer, ROWS)
    normalizer = trainer.learner.normalizer
    assert normalizer is not None
    policy = Policy(trainer.algorithm, ctx, normalizer)
    try:
        program = traced(policy).module()
    except ConfigError as error:
        if policy.plans:
            trainer.close()
            return
        raise AssertionError(f"`rlplug export` refuses it: {error.message}") from None
    (native,) = (ctx.spec.native_spaces or ctx.spec.groups).values()
    known = {x.name for x in policy.inputs}
    carry = {name: x for name, x in policy.example(COLUMNS).items() if name.startswith("carry.")}
    for t, (row, out) in enumerate(zip(rows, answers(trainer.algorithm, ctx, rows, "greedy"), strict=True)):
        inputs = {name: x + torch.as_tensor(policy.starts.get(name, 0)) for name, x in flat(row["obs"]).items()}
        inputs |= {name: row[name] for name in ("is_first", "action_mask") if name in known}
        if "reward" in known:
            inputs["reward"] = row["prev_reward"]
        if "prev_action" in row:  # of a random policy, which the rows are of
            carry["carry.prev_action"] = row["prev_action"]
        found = program(inputs | carry)
        carry = {name: found[f"{NEXT}{name}"] for name in carry}
        expected = torch.from_numpy(joined(native.action)(out["action"].numpy()))
        differ = (found["action"].double() - expected.double()).abs().max().item()
        said = f"exported, the policy acts otherwise in row {t}, by {differ:.2g}: does act() keep state on self?"
        require(differ <= TOLERANCE, said)
    trainer.close()


class _Rows(nn.Module):
    """A model, called on rows ``[B, ...]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, carry: Batch, is_first: Tensor) -> tuple[Tensor, Batch]:
        return self.model(x, carry, is_first)


def check_model_export(model: Any, space: spaces.Space[Any], what: str) -> None:
    """Check that a model's features of rows of a space can be exported."""
    space.seed(0)
    picks = [space.sample() for _ in range(COLUMNS)]
    x = tree.map(lambda *x: torch.as_tensor(np.stack(x)), *picks)
    given = x, model.initial_carry(COLUMNS), torch.arange(COLUMNS) == 0
    batch = Dim("batch")
    shapes = tree.map(lambda _: {0: batch}, dict(enumerate(given)))
    try:
        with torch.no_grad():
            program = torch.export.export(_Rows(model), given, dynamic_shapes=tuple(shapes.values())).module()
            (features, after), (expected, wanted) = program(*given), model(*given)
    except Exception as error:
        raise AssertionError(f"{what}: `rlplug export` refuses a policy with it: {reason_of(error)}") from None
    pairs = zip(
        tree.leaves({"features": features, **after}), tree.leaves({"features": expected, **wanted}), strict=True
    )
    close = all(torch.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in pairs)
    require(close, f"{what}: exported, it gives other features: does forward() keep state on self?")

"""One rank equals two ranks equals four microbatches: hardware changes how fast, never what."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Segment
from rlplug.config import parse
from rlplug.context import RunContext
from rlplug.distributed.fabric import one_rank
from rlplug.testing.checks.runs import Case, again, differences, flat, play, require, some, watch
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.learner import RankLearner
from rlplug.types import Batch

TOLERANCE = 1e-6


def check_ranks(case: Case) -> None:
    """One update from one global sample gives the same weights and metrics, to 1e-6, however it is shared out."""
    question = ask(case)
    alone = one_update(one_rank(), question)
    for how, other in (
        ("four microbatches", one_update(one_rank(), question, 4)),
        *((f"rank {rank} of two", answer) for rank, answer in enumerate(ranks(2)(one_update, question))),
    ):
        far = distances(alone, other)
        require(
            not far,
            f"one update gives something else on {how} than on one rank, in {some(far)}: draw noise in prepare() with"
            " ctx.randn, take statistics over the rows of all ranks with learner.reduce, let terms be per row, and"
            " shuffle with learner.minibatches",
        )


def ask(case: Case) -> dict[str, Any]:
    """A trained algorithm's weights and the next sample of its buffer: what ``one_update`` starts from."""
    trainer = case.build("num_envs=8")
    learner = watch(trainer)
    play(trainer, 1)
    sample = {key: leaf for key, leaf in learner.sampled.items() if key != "gradients"}  # computed from the rows anew
    columns = sample["valid"].shape[1]
    require(columns % 4 == 0, f"a sample has {columns} columns; pass overrides that make it divisible by 4")
    ctx = trainer.ctx
    options = {"spec": ctx.spec, "needs": ctx.needs, "num_envs": 8, "total_steps": ctx.total_steps}
    options |= {"rollout_length": ctx.rollout_length, "batch_size": ctx.batch_size, "seed": ctx.seed}
    trainer.close()
    return {
        "raw": trainer.config.raw,
        "options": options,
        "state": trainer.algorithm.state_dict(),
        "progress": dataclasses.replace(trainer.progress),
        "steps": trainer.steps,
        "sample": sample,
    }


def one_update(fabric: Any, question: dict[str, Any], microbatches: int = 1) -> dict[str, Tensor]:
    """Make the update on this rank's columns of the sample."""
    config = parse(question["raw"])
    rank, world = fabric.global_rank, fabric.world_size
    env_ids = np.array_split(np.arange(question["options"]["num_envs"]), world)[rank].tolist()
    ctx = RunContext(slots=config.models, rank=rank, world_size=world, env_ids=env_ids, **question["options"])
    torch.manual_seed(ctx.seed)
    algorithm = config.algo.build(ctx)
    algorithm.load_state_dict(question["state"])
    share = columns_of(question["sample"], rank, world)
    progress = dataclasses.replace(question["progress"])
    learner = RankLearner(
        fabric=fabric, ctx=ctx, algorithm=algorithm, buffer=again(share), progress=progress, microbatches=microbatches
    )
    ctx.schedules.refresh(question["steps"])
    algorithm.observe(Segment(share), learner)
    losses = learner.update()
    return flat({"weights": algorithm.state_dict(), "logged": losses.terms | losses.metrics})


def columns_of(sample: Batch, rank: int, world: int) -> Batch:
    """This rank's columns: leaves ``[T+1, B, ...]``, and ``[B]`` for what is said of a whole sample."""
    return tree.map(lambda x: x.chunk(world, min(1, x.ndim - 1))[rank].contiguous(), sample)


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the numbers that differ by more than ``TOLERANCE``, and by how much.

    One element of a tensor in a thousand, rounded, may differ by a hundred times as much: Adam divides a gradient by
    its own size, and so makes the rounding of one that is nearly zero as large as a step. In BC on Pendulum one of 768
    begins with a gradient of 3.71e-9, or 3.69e-9 if it is added up by microbatches, where the median is 2e-5: beside
    Adam's epsilon of 1e-8 that is a thousandth of a step.
    """
    require(a.keys() == b.keys(), f"only one of them has {some(sorted(a.keys() ^ b.keys()))}")
    found = []
    for name in differences(a, b):
        x, y = a[name].double(), b[name].double()
        far = (x - y).abs() / x.abs().clamp(min=1.0)
        beyond = int((far > TOLERANCE).sum())
        if beyond > round(far.numel() / 1000) or not far.max() <= 100 * TOLERANCE:
            found.append(f"{name} (by {far.max().item():.1e})")
    return sorted(found)

"""Check that one rank, two ranks and four microbatches give equal results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Exploration, Segment
from rlplug.config import parse
from rlplug.context import RunContext
from rlplug.distributed.fabric import one_rank
from rlplug.testing.checks.runs import (
    COLUMNS,
    Case,
    again,
    answers,
    asking,
    differences,
    episodes,
    flat,
    play,
    require,
    some,
    watch,
)
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.learner import RankLearner
from rlplug.types import Batch

TOLERANCE = 1e-6


def check_ranks(case: Case) -> None:
    """Check that an update on one global sample gives equal weights and metrics, to 1e-6, for any sharding."""
    question = ask(case)
    alone = one_update(one_rank(), question)
    for how, other in (
        ("four microbatches", one_update(one_rank(), question, 4)),
        *((f"rank {rank} of two", answer) for rank, answer in enumerate(ranks(2)(one_update, question))),
    ):
        far = distances(alone, other)
        require(
            not far,
            f"one update on {how} differs from one on one rank in {some(far)}: draw noise in prepare() with"
            " ctx.randn, take statistics over the rows of all ranks with learner.reduce, return terms per row, and"
            " shuffle with learner.minibatches",
        )


def check_exploration_ranks(case: Case, name: str) -> None:
    """Check that a module's statistics, rewards, updates and perturbations on two ranks equal those on one, to 1e-6."""
    question = ask(case, f"exploration=[{name}]")
    alone, acted = one_update(one_rank(), question), one_act(one_rank(), question)
    answers = ranks(2)(one_update, question)
    for rank, answer in enumerate(answers):
        far = distances(alone, answer)
        require(
            not far,
            f"one update on rank {rank} of two differs from one on one rank in {some(far)}: merge statistics"
            " with learner.reduce in observe(), and draw shared numbers with rows=False",
        )
    for rank, answer in enumerate(ranks(2)(one_act, question)):
        mine = {key: leaf.chunk(2, 1)[rank] if key.startswith("perturb.") else leaf for key, leaf in acted.items()}
        far = distances(mine, answer)
        require(
            not far,
            f"acting on rank {rank} of two differs from acting on one rank in {some(far)}: draw a number for"
            " every row with ctx.rand or ctx.randn, shared numbers with rows=False, and index by ctx.env_ids",
        )


def ask(case: Case, *overrides: str) -> dict[str, Any]:
    """Return a trained algorithm's weights and the next sample of its buffer, the input of ``one_update``.

    Exploration modules are included if ``overrides`` select them.
    """
    trainer = case.build("num_envs=8", *overrides)
    learner = watch(trainer)
    play(trainer, 1)
    sample = {key: leaf for key, leaf in learner.sampled.items() if key != "gradients"}  # recomputed from the rows
    if "reward_int" in sample:  # as returned by the buffer
        sample["reward"] = sample["reward"] - sample.pop("reward_int")
    columns = 0 if learner.given else sample["valid"].shape[1]
    require(columns % 4 == 0, f"a sample has {columns} columns; pass overrides that make it divisible by 4")
    ctx, modules = trainer.ctx, trainer.policy.exploration if overrides else {}
    options = {"spec": ctx.spec, "needs": ctx.needs, "num_envs": 8, "total_steps": ctx.total_steps}
    options |= {"rollout_length": ctx.rollout_length, "batch_size": ctx.batch_size, "seed": ctx.seed}
    rows = episodes(trainer) if modules else []
    acted = answers(trainer.algorithm, ctx, rows, "explore")
    trainer.close()
    return {
        "raw": trainer.config.raw,
        "options": options,
        "state": trainer.algorithm.state_dict(),
        "exploration": {name: extra.state_dict() for name, extra in modules.items()},
        "progress": dataclasses.replace(trainer.progress),
        "steps": trainer.steps,
        "sample": sample,
        "given": learner.given,
        "episodes": learner.episodes,
        "acted": list(zip(acted, rows, strict=True)),
    }


def one_update(fabric: Any, question: dict[str, Any], microbatches: int = 1) -> dict[str, Tensor]:
    """Make the update on this rank's columns of the sample, or on a whole batch from the loop."""
    ctx, algorithm, exploration = _restored(fabric, question)
    given, sample = question["given"], question["sample"]
    share = tree.map(torch.clone, sample) if given else columns_of(sample, ctx.rank, ctx.world_size)
    learner = RankLearner(
        fabric=fabric,
        ctx=ctx,
        algorithm=algorithm,
        buffer=again(share),
        exploration=exploration,
        progress=dataclasses.replace(question["progress"]),
        microbatches=microbatches,
    )
    if given:
        learner.hold(True)
    for segment in [Segment(rows, whole=True) for rows in question["episodes"]] if given else [Segment(share)]:
        learner.observe(segment)
    losses = learner.update(share) if given else learner.update()
    modules = {name: extra.state_dict() for name, extra in exploration.items()}
    return flat({"weights": algorithm.state_dict(), "exploration": modules, "logged": losses.terms | losses.metrics})


def one_act(fabric: Any, question: dict[str, Any]) -> dict[str, Tensor]:
    """Return perturbed weights, and ``perturb.<key> [rows, B, ...]`` of this rank's shard of ``COLUMNS``."""
    ctx, algorithm, exploration = _restored(fabric, question)
    share = np.array_split(np.arange(COLUMNS), ctx.world_size)[ctx.rank].tolist()
    weights, found = {name: p.detach() for name, p in algorithm.named_parameters()}, list[Batch]()
    with asking(ctx, env_ids=share):
        for extra in exploration.values():
            weights = extra.perturb_weights(weights)
            carry = extra.initial_carry(len(share))
            for pair in question["acted"]:
                out, row = (tree.map(lambda leaf: leaf[share], part) for part in pair)
                out, carry = extra.perturb(out, row, carry)
                found.append(tree.map(torch.clone, out))
    acted = tree.map(lambda *leaves: torch.stack(leaves), *found)
    return flat({"perturb": acted, "perturb_weights": {name: w.clone() for name, w in weights.items()}})


def _restored(fabric: Any, question: dict[str, Any]) -> tuple[RunContext, Algorithm, dict[str, Exploration]]:
    """Build the algorithm and exploration of ``ask`` on a rank, with the same state."""
    config = parse(question["raw"])
    rank, world = fabric.global_rank, fabric.world_size
    env_ids = np.array_split(np.arange(question["options"]["num_envs"]), world)[rank].tolist()
    place = {"rank": rank, "world_size": world, "env_ids": env_ids, "make_env": config.env.build}
    ctx = RunContext(slots=config.models, **place, **question["options"])
    torch.manual_seed(ctx.seed)
    algorithm = config.algo.build(ctx)
    algorithm.load_state_dict(question["state"])
    exploration = {
        name: chosen.build(ctx) for name, chosen in config.exploration.items() if name in question["exploration"]
    }
    for name, extra in exploration.items():
        extra.load_state_dict(question["exploration"][name])
    ctx.schedules.refresh(question["steps"])
    return ctx, algorithm, exploration


def columns_of(sample: Batch, rank: int, world: int) -> Batch:
    """Return this rank's columns: leaves ``[T+1, B, ...]``, and ``[B]`` for keys of whole columns."""
    return tree.map(lambda x: x.chunk(world, min(1, x.ndim - 1))[rank].contiguous(), sample)


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of values that differ by more than ``TOLERANCE``, with the difference.

    One element of a tensor of at least 32, and one in a thousand of a larger one, may differ by a hundred times as
    much: Adam divides a gradient by its magnitude, which scales the rounding error of a gradient near zero to a step.
    In BC on Pendulum, one of 768 elements starts with a gradient of 3.71e-9, or 3.69e-9 if summed over microbatches,
    where the median is 2e-5: with Adam's epsilon of 1e-8, this is a thousandth of a step.
    """
    require(a.keys() == b.keys(), f"only one of them has {some(sorted(a.keys() ^ b.keys()))}")
    found = []
    for name in differences(a, b):
        x, y = torch.as_tensor(a[name]).double(), torch.as_tensor(b[name]).double()
        far = (x - y).abs() / x.abs().clamp(min=1.0)
        beyond = int((far > TOLERANCE).sum())
        if beyond > (math.ceil(far.numel() / 1000) if far.numel() >= 32 else 0) or not far.max() <= 100 * TOLERANCE:
            found.append(f"{name} (by {far.max().item():.1e})")
    return sorted(found)

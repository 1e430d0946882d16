"""Exploration on top of an algorithm: it works where the algorithm allows it, and is refused where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlplug.api import Exploration
from rlplug.registry import load
from rlplug.testing.checks.algorithms import require_inside
from rlplug.testing.checks.runs import (
    COLUMNS,
    Case,
    answers,
    asking,
    differences,
    episodes,
    learner_of,
    play,
    require,
    some,
    trainables,
    watch,
)
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, map_leaves


def accepts(case: Case, name: str) -> bool:
    """Can the exploration be added? Refusals blame ``exploration``.

    Raises:
        AssertionError: it was accepted although its ``perturb`` does what the algorithm cannot learn from.
    """
    perturbs = load("exploration", name).perturb is not Exploration.perturb
    try:
        trainer = case.build(f"exploration=[{name}]")
    except ConfigError as error:
        require(
            error.key.startswith("exploration"),
            f"is refused with the key {error.key!r}; a refusal names its own key, exploration.{name}",
        )
        return False
    allowed = trainer.ctx.needs.perturbed or not perturbs
    trainer.close()
    require(allowed, f"changes the actions of {case.name}, whose needs() say perturbed=False; it must be refused")
    return True


def check_exploration(case: Case, name: str) -> None:
    """A short run with it: it changes the data, actions stay inside the space, equal seeds give equal runs."""
    cls = load("exploration", name)
    require(issubclass(cls, Exploration), f"{cls.__name__} is no rlplug.api.Exploration: derive it from that class")
    runs = []
    for word in (f"exploration=[{name}]", f"exploration=[{name}]", "exploration=[]"):
        trainer = case.build(word)
        watch(trainer)
        record = play(trainer)
        for losses in record.losses:
            wrong = [key for key, value in losses.items() if not torch.isfinite(value).all()]
            require(not wrong, f"{some(wrong)} is not finite with {name} on top of {case.name}")
        runs.append((trainer.algorithm.state_dict(), record.losses))
        if word != "exploration=[]":
            _check_module(trainer, trainer.exploration[name])
        trainer.close()
    names = differences(runs[0], runs[1])
    require(not names, f"two runs with seed 0 differ in {some(names)}: draw with ctx.randn, ctx.rand and ctx.randint")
    require(differences(runs[0][0], runs[2][0]), f"a run of {case.name} is the same with and without it")


def _check_module(trainer: Trainer, extra: Exploration) -> None:
    rows = episodes(trainer)
    acted = answers(trainer.algorithm, trainer.ctx, rows, "explore")
    space = trainer.ctx.spec.sole.action
    with asking(trainer.ctx):
        carry = extra.initial_carry(COLUMNS)
        for out, row in zip(acted, rows, strict=True):
            before = map_leaves(torch.clone, out)
            changed, carry = extra.perturb(out, row, carry)
            names = differences(before, out)
            require(not names, f"perturb() writes into {some(names)} of its argument: give a new tensor")
            require(changed.keys() >= out.keys(), f"perturb() drops {sorted(out.keys() - changed.keys())}")
            require_inside(changed["action"], space, "perturb()")
    sample = trainer.learner.sample()
    reward: Any = extra.reward(sample)
    if reward is not None:
        require(isinstance(reward, Tensor), f"reward() gives a {type(reward).__name__}; give a tensor or None")
        require(
            reward.shape == sample["reward"].shape,
            f"reward() has shape {list(reward.shape)}; it has a number for every row: {list(sample['reward'].shape)}",
        )
        require(torch.isfinite(reward[sample["valid"]]).all(), "reward() is not finite on every valid row")
    learns = trainables(learner_of(trainer), extra).values()
    owned = {id(p) for who in learns for part in learner_of(trainer).parts(who).values() for p in part.params}
    lost = [name for name, p in extra.named_parameters() if p.requires_grad and id(p) not in owned]
    require(not lost, f"no optimizer has the parameter {some(lost)}: add it to a part, or call requires_grad_(False)")

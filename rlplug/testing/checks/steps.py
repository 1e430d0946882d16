"""Checks of ``forward`` at real gradient steps: it is pure, its terms have rows, its parts are disjoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Losses, Trainable
from rlplug.testing.checks.causes import check_rows, counted, mixing_layers, random_layers
from rlplug.testing.checks.runs import (
    Case,
    Watching,
    differences,
    each_gradient_step,
    learning,
    require,
    some,
    trainables,
    watch,
)
from rlplug.types import Batch


def check_terms(case: Case) -> None:
    """Check that terms are per row or 0-d, finite on valid rows, and have a gradient."""

    def look(learner: Watching, who: Trainable, batch: Batch, parts: Sequence[str]) -> None:
        losses = who.forward(batch, parts)
        require(isinstance(losses, Losses), f"forward() returns {type(losses).__name__}; return rlplug.api.Losses")
        require(losses.terms, f"forward() gives no terms for the parts {', '.join(parts)}")
        rows = [term for term in (*losses.terms.values(), *losses.metrics.values()) if term.ndim]
        alive = batch.get("alive", torch.empty(()))
        like = alive if any(term.ndim == alive.ndim for term in rows) else batch.get("valid")
        for name, term in (losses.terms | losses.metrics).items():
            if term.ndim == 0:
                continue
            wanted = [rows[0].shape] if like is None else [like.shape, (len(like) - 1, *like.shape[1:])]
            require(
                any(tuple(term.shape) == tuple(shape) for shape in wanted),
                f"forward() gives {name!r} with shape {list(term.shape)}; a term or metric is 0-d, or has a number for"
                f" every row: {' or '.join(str(list(shape)) for shape in wanted)}",
            )
        for name, term in losses.terms.items():
            require(term.requires_grad, f"the term {name!r} has no gradient: was it detached, or computed in no_grad?")
            mask = counted(batch, term)
            finite = torch.isfinite(term if mask is None else term[mask]).all()
            require(finite, f"the term {name!r} is not finite on every valid row")

    each_gradient_step(case, look)


def check_pure(case: Case) -> None:
    """Check that ``forward`` is deterministic per row, and does not modify weights, generators or batch."""

    def look(learner: Watching, who: Trainable, batch: Batch, parts: Sequence[str]) -> None:
        state, dice, rows = _copy(who.state_dict()), _dice(learner.ctx.generators), tree.map(torch.clone, batch)
        first = _detached(who.forward(batch, parts))
        second = _detached(who.forward(batch, parts))
        names = differences(dice, _dice(learner.ctx.generators))
        why = random_layers(who) or "draw noise in prepare() with ctx.randn"
        require(not names, f"forward() draws from the generator {some(names)}: {why}")
        names = differences(state, who.state_dict())
        why = mixing_layers(who) or "change state in after_step() or observe()"
        require(not names, f"forward() changes {some(names)}: {why}")
        names = differences(rows, batch)
        require(not names, f"forward() changes {some(names)} of its batch: give new tensors new names")
        names = differences(first, second)
        require(not names, f"forward() called twice on one batch gives different {some(names)}: it must be pure")
        check_rows(who, batch, parts)

    each_gradient_step(case, look)


def check_parts(case: Case) -> None:
    """Check that each parameter belongs to one optimizer, and gets its gradient only from that part's terms."""
    trainer = case.build()
    learner = watch(trainer)
    owners: dict[int, list[str]] = {}
    for name, who in trainables(learner, trainer.algorithm).items():
        for part, what in learner.parts(who).items():
            for p in what.params:
                owners.setdefault(id(p), []).append(f"{name}.{part}".lstrip("."))
    names = {id(p): name for name, p in trainer.algorithm.named_parameters()}
    foreign = [parts[0] for p, parts in owners.items() if p not in names]
    require(
        not foreign, f"part {some(foreign)} steps a parameter that does not belong to the algorithm: assign it to self"
    )
    for name, p in trainer.algorithm.named_parameters():
        mine = owners.get(id(p), [])
        if p.requires_grad:
            require(mine, f"no optimizer has the parameter {name}: add it to a part, or call requires_grad_(False)")
        require(len(mine) < 2, f"the parameter {name} is in several optimizers ({', '.join(mine)}): leave it in one")
    trainer.close()

    def look(learner: Watching, who: Trainable, batch: Batch, parts: Sequence[str]) -> None:
        params = {part: learning(learner.parts(who)[part]) for part in parts}
        names = {id(p): name for name, p in who.named_parameters()}
        alone: dict[int, Tensor | None] = {}
        for part in parts:
            gradients = _gradients(who, batch, (part,), [p for ps in params.values() for p in ps])
            for other, others in params.items():
                for p in others:
                    if other == part:
                        alone[id(p)] = gradients[id(p)]
                        continue
                    leak = gradients[id(p)]
                    require(
                        leak is None or not leak.any(),
                        f"the terms of part {part!r} give a gradient to {names[id(p)]} of part {other!r}: pass detached"
                        " parameters with torch.func.functional_call, or detach the value",
                    )
        together = _gradients(who, batch, parts, [p for ps in params.values() for p in ps])
        for p, gradient in together.items():
            one, both = alone[p], gradient
            same = one is both or (one is not None and both is not None and torch.allclose(one, both, 1e-4, 1e-6))
            require(
                same or (one is None and both is not None and not both.any()),
                f"{names[p]} gets a different gradient from all parts together than from its own part only",
            )

    each_gradient_step(case, look)


def _gradients(
    who: Trainable, batch: Batch, parts: Sequence[str], params: Sequence[Tensor]
) -> dict[int, Tensor | None]:
    total = torch.zeros(())
    for term in who.forward(batch, parts).terms.values():
        mask = counted(batch, term)
        total = total + (term if mask is None else torch.where(mask, term, 0.0)).sum()
    gradients = torch.autograd.grad(total, list(params), allow_unused=True)
    return dict(zip(map(id, params), gradients, strict=True))


def _detached(losses: Losses) -> dict[str, Any]:
    said = dict(vars(losses))
    said["diagnostics"] = losses.diagnostics() if losses.diagnostics is not None else {}
    return {name: tree.map(lambda x: x.detach().clone(), tensors) for name, tensors in said.items()}


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _dice(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """Return the states of the context's generators and of the global ones."""
    numpy_state: Any = np.random.get_state()
    own = {f"ctx.{role}": generator.get_state() for role, generator in generators.items()}
    others = {"torch": torch.get_rng_state(), "numpy": numpy_state[1], "numpy position": numpy_state[2]}
    return own | others | {"random": hash(random.getstate())}

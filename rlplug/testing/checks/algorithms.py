"""Checks of algorithms: learning, actions inside the space, determinism, and complete state."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import tree
from rlplug.agents.insight import has_density
from rlplug.api import Algorithm, Losses, Needs
from rlplug.compiler import artifact
from rlplug.registry import hookimpl, load
from rlplug.testing.checks.causes import random_layers, require_own_rows
from rlplug.testing.checks.kept import Lent, attributes
from rlplug.testing.checks.runs import (
    COLUMNS,
    UPDATES,
    Case,
    answers,
    differences,
    episodes,
    learning,
    play,
    require,
    some,
    trainables,
    watch,
)
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch

COMPILED = 3
"""updates compared with compiled ones: enough to see changes from one update to the next"""


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret traced graphs instead of compiling them, which saves ten seconds for each."""
    with mock.patch.object(artifact, "loaded", lambda graph, _: torch.no_grad()(lambda leaves: graph(*leaves))):
        yield


def check_learns(case: Case) -> None:
    """Check that terms and metrics are finite over a few updates, and that every part updates its parameters."""
    cls = load("algo", case.name)
    require(issubclass(cls, Algorithm), f"{cls.__name__} is not an rlplug.api.Algorithm: derive it from that class")
    trainer = case.build()
    needs = trainer.ctx.needs
    require(isinstance(needs, Needs), f"needs() returns {type(needs).__name__}; return rlplug.api.Needs")
    learner = watch(trainer)
    parts = {
        f"{name}.{key}".lstrip("."): part
        for name, who in trainables(learner, trainer.algorithm).items()
        for key, part in learner.parts(who).items()
        if learning(part)
    }
    before = {name: [p.detach().clone() for p in part.params] for name, part in parts.items()}
    updates = max([UPDATES + 1, *(part.optim.every for part in parts.values())])
    lent = Lent()
    history = play(trainer, updates, also=lent)
    held = lent.held(trainer)
    require(not held, f"{some(held)} shares the memory of a segment, which the collector overwrites: keep a .clone()")
    learns = any(True for _ in trainer.algorithm.parameters())  # a planner has none
    for number, losses in enumerate(history.losses, 1):
        require(losses or not learns, f"update {number} returns no terms and no metrics: nothing would be logged")
        for name, value in losses.items():
            require(value.ndim == 0, f"update() returns {name!r} with shape {list(value.shape)}; logged values are 0-d")
            require(
                torch.isfinite(value),
                f"{name!r} is {value.item()} at update {number}: look for log(0), a division by 0, exp of something"
                " large, or rows that `valid` excludes",
            )
    for name, part in parts.items():
        wrong = [tuple(p.shape) for p in part.params if not torch.isfinite(p).all()]
        require(not wrong, f"part {name!r} has parameters that are not finite after {updates} updates: {wrong}")
        still = all(torch.equal(a, b) for a, b in zip(before[name], part.params, strict=True))
        sizes = [group["lr"] for group in part.optim.optimizer.param_groups]
        waits = part.optim.lr is not None and not any(sizes)
        require(
            waits or not still,
            f"part {name!r} changed no parameter after {updates} updates: does forward compute its terms, and does"
            " update() name it?",
        )
    trainer.close()


def check_act(case: Case) -> None:
    """Check that actions have the space's shape and dtype, and lie inside it, in every mode."""
    trainer = case.build()
    play(trainer, 1)
    rows, spec, needs = episodes(trainer), trainer.ctx.spec, trainer.ctx.needs
    for mode in ("explore", "greedy", "random"):
        for out in answers(trainer.algorithm, trainer.ctx, rows, mode):
            for leaf in tree.leaves(out):
                require(isinstance(leaf, Tensor), f"act({mode!r}) returns a {type(leaf).__name__}; return tensors")
            for name, group in spec.groups.items():
                part, who = out[name] if spec.nested else out, f"act() in mode {mode!r}"
                require("action" in part, f"{who} returns {sorted(part)} without 'action'")
                # A Gaussian policy that trains on its own log-probabilities may leave the box: the environment clips.
                learns_by_logp = has_density(type(trainer.algorithm))
                own = "logp" in needs.keys or not needs.off_policy or learns_by_logp
                bounded = not isinstance(group.action, spaces.Box) or needs.perturbable or not own
                action = part["action"].flatten(0, 1) if group.agents else part["action"]
                require_inside(action, group.action, who, bounded)
    said = [answers(trainer.algorithm, trainer.ctx, rows, "greedy", seed) for seed in (1, 2)]
    names = differences(*([_actions(out) for out in outs] for outs in said))
    why = random_layers(trainer.algorithm) or "an evaluation uses the best action"
    require(not names, f"act() in mode 'greedy' depends on random numbers; {why}")
    _check_columns(trainer, rows, said[0])
    _check_random(trainer, rows)
    trainer.close()


def _check_random(trainer: Trainer, rows: Sequence[Batch]) -> None:
    """Check that random actions do not depend on the weights, which it changes."""
    before = answers(trainer.algorithm, trainer.ctx, rows, "random")
    with torch.no_grad():
        for p in trainer.algorithm.parameters():
            p.mul_(-3.0)
    after = answers(trainer.algorithm, trainer.ctx, rows, "random")
    names = differences(*([_actions(out) for out in outs] for outs in (before, after)))
    require(
        not names,
        "act() in mode 'random' depends on the weights: choose uniformly among the allowed actions, as"
        " Distribution.uniform() does",
    )


def _check_columns(trainer: Trainer, rows: Sequence[Batch], acted: Sequence[Batch]) -> None:
    """Check that actions for an environment do not depend on the other environments of a batch."""
    for column in range(COLUMNS):
        alike = [tree.map(lambda leaf: leaf[[column] * COLUMNS], row) for row in rows]  # noqa: B023
        for one, other in zip(acted, answers(trainer.algorithm, trainer.ctx, alike, "greedy"), strict=True):
            alone, among = (tree.map(lambda leaf: leaf[column], _actions(out)) for out in (one, other))  # noqa: B023
            require_own_rows(alone, among, "act() gives an environment a different action", trainer.algorithm)


def _actions(out: Batch) -> Any:
    return {name: part["action"] for name, part in out.items() if isinstance(part, dict) and "action" in part} or out[
        "action"
    ]


def require_inside(action: Tensor, space: spaces.Space[Any], who: str, bounded: bool = True) -> None:
    """Require every row of ``action [B, ...]`` to be in ``space``, ignoring its bounds if not ``bounded``."""
    shape = (len(action), *(space.shape or ()))
    require(
        tuple(action.shape) == shape,
        f"{who} gives actions of shape {list(action.shape)}; the space {space} needs {list(shape)}",
    )
    floating = isinstance(space, spaces.Box)
    require(
        action.is_floating_point() == floating,
        f"{who} gives actions of type {action.dtype}; the space {space} needs {'float32' if floating else 'int64'}",
    )
    require(torch.isfinite(action).all(), f"{who} gives actions that are not finite")
    if bounded:
        inside = [space.contains(row) for row in action.cpu().numpy().astype(space.dtype)]
        outside = [a.tolist() for a, fits in zip(action, inside, strict=True) if not fits]
        require(not outside, f"{who} gives actions outside of {space}, such as {outside[:1]}")


class Disturb:
    """A hook that must not change a run: it uses the global generators, and evaluates."""

    def __init__(self) -> None:
        self.salt = 12345

    @hookimpl
    def rlplug_updated(self, run: Any, losses: Losses) -> None:
        if self.salt == 12345:
            run.evaluate()
        self.reseed()

    def reseed(self) -> None:
        self.salt += 1
        torch.manual_seed(self.salt)
        np.random.seed(self.salt)
        random.seed(self.salt)


def check_determinism(case: Case) -> None:
    """Check that equal seeds give bit-identical runs, independent of evaluations, and other seeds different ones."""

    def run(seed: int, disturb: Disturb | None = None) -> tuple[Any, Any]:
        """Return the weights, or without weights the last rows, and the losses."""
        trainer = case.build(seed=seed)
        if disturb is not None:
            disturb.reseed()
        history = play(trainer, also=disturb)
        trainer.close()
        return trainer.algorithm.state_dict() or history.segment, history.losses

    (weights, losses), (disturbed, losses_disturbed), (other, _) = run(0), run(0, Disturb()), run(1)
    if differences(weights, disturbed) or differences(losses, losses_disturbed):
        again, losses_again = run(0)
        names = differences(weights, again) + differences(losses, losses_again)
        require(not names, f"two runs with seed 0 differ in {some(names)}: is a set iterated over, or the time read?")
        raise AssertionError(
            "a run changes when other code uses the global generators and an evaluation runs in between: draw"
            " with ctx.randn, ctx.rand and ctx.randint only, and change nothing in act() in mode 'greedy'",
        )
    what = "rows" if "valid" in weights else "weights"
    require(differences(weights, other), f"a run with seed 1 ends with the {what} of seed 0: the seed is ignored")


def check_compiled(case: Case) -> None:
    """Check that functions traced for ``compile=max`` compute the same as Python, up to rounding."""
    differ: list[str] = []
    why = "what act, perturb, prepare and forward read of self is traced once; keep changing values in tensors, and"
    why = f"{why} update them in place"

    def run(compile: str) -> list[dict[str, Tensor]]:
        trainer = case.build(f"compile={compile}")
        with interpreted(), warnings.catch_warnings(record=True) as said:  # it may run eagerly
            warnings.simplefilter("always")
            history = play(trainer, COMPILED)
        trainer.close()
        differ.extend(str(one.message) for one in said if "compared with the eager function" in str(one.message))
        return history.losses[:COMPILED]

    for number, (eager, traced) in enumerate(zip(run("off"), run("max"), strict=True), 1):
        both = [key for key in eager if key in traced]
        names = [key for key in both if not torch.allclose(eager[key].float(), traced[key].float(), 1e-3, 1e-3)]
        require(not names, f"with compile=max {some(names)} of update {number} differ: {why}")
    require(not differ, f"{'; '.join(differ)}: {why}")


def check_state(case: Case) -> None:
    """Check that acting depends only on ``state_dict``, and that ``actor_keys`` is enough for actors."""
    trained = case.build()
    play(trained)
    rows, state = episodes(trained), trained.algorithm.state_dict()
    missing = [key for key in trained.algorithm.actor_keys() if key not in state]
    require(not missing, f"actor_keys() names {some(missing)}, which state_dict() does not have")
    for what, keys, strict in (
        ("state_dict()", tuple(state), True),
        ("the weights that actor_keys() names", trained.algorithm.actor_keys(), False),
    ):
        fresh = case.build(seed=1)
        fresh.algorithm.load_state_dict({key: state[key] for key in keys}, strict=strict)
        now = fresh.algorithm.state_dict()
        names = differences({key: now.get(key) for key in keys}, {key: state[key] for key in keys})
        require(not names, f"load_state_dict() does not restore {some(names)} of {what}")
        fresh.ctx.schedules.refresh(trained.steps)
        trained.ctx.schedules.refresh(trained.steps)
        for mode in ("greedy", "explore"):
            said = [answers(t.algorithm, t.ctx, rows, mode) for t in (trained, fresh)]
            names = sorted({name.partition(".")[2] for name in differences(*said)})
            own = differences(*(dict(attributes(t.algorithm)) for t in (trained, fresh))) if names and strict else []
            mine = f"; on self, and not in state_dict(), is {some(own)}" if own else ""
            require(
                not names,
                f"a fresh algorithm that loaded {what} acts differently in mode {mode!r} ({some(names)}){mine}: keep"
                " what act() reads in parameters and registered buffers"
                + ("" if strict else ", named in actor_keys()"),
            )
        fresh.close()
    trained.close()

"""Gradient steps as machine code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlplug.api import Trainable
from rlplug.nn import Adam
from rlplug.trainer.artifact import Artifact
from rlplug.trainer.minibatches import Total
from rlplug.trainer.optimizer import OptimizerState
from rlplug.types import Batch, Tree

MOST_KINDS = 4  # of batches for one function, as each takes some ten seconds; with more, shapes are ever new
DECIDES_AFTER = 1000  # gradient steps, by which compile=auto knows how many there are in the whole run
PAYS = 50_000  # gradient steps ahead: each saves 0.6 ms or more, and a compiler that knows nothing yet takes 30 s

Forward: TypeAlias = Callable[[Batch, Trainable, Sequence[str]], Total]


@dataclass
class Graph:
    """What came out of one: of a trainable's losses, the mean or the sum, and what became of the gradients."""

    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]
    feedback: Batch
    norms: Mapping[str, Sequence[Tensor]]
    """of the gradients before they were clipped, by part; none where the graph moved nothing"""
    grads: Sequence[Tensor | None] = ()
    """of the parameters of the due parts; none where the graph moved them"""
    count: Tensor | float = 1.0
    """valid rows; unknown where the graph moved the parameters"""


class Graphs:
    """Compiles a gradient step into one graph: forward and backward, and with ``moves`` clipping and Adam's step.

    Whether it does is decided by counts alone, so that a run that is repeated or resumed decides the same.

    Args:
        forward: computes the losses of the due parts of a trainable.
        at_once: from the first step on; otherwise where it pays, see ``decide``.
        varies: batches have one and another number of rows; then one graph serves every size.
        moves: a step is taken whatever its numbers are, and all gradients are here.
    """

    def __init__(self, forward: Forward, at_once: bool, varies: bool, moves: bool) -> None:
        self.forward, self.varies, self.moves = forward, varies, moves
        self.wanted: bool | None = at_once or None
        """None: not decided yet"""
        self.works = True
        self._steps, self._since = 0, -1  # gradient steps that were counted to decide, since this step of the run
        self._artifacts: dict[Any, list[Artifact]] = {}  # of a function, one for each kind of batch
        self._failed, self._collected = set[Any](), set[Any]()

    def decide(self, done: int, total: int) -> None:
        """Compile from now on if so many gradient steps are ahead that it pays, after ``done`` of ``total`` steps."""
        if self.wanted is not None:
            return
        if self._since < 0:
            self._since = done
        if self._steps >= DECIDES_AFTER and done > self._since:
            self.wanted = self._steps / (done - self._since) * (total - done) >= PAYS

    def run(
        self, batch: Batch, who: Trainable, due: Sequence[str], own: Mapping[str, OptimizerState], step: bool
    ) -> Graph | None:
        """Run a gradient step. None: there is no graph; a warning says once if it cannot be made.

        Args:
            own: optimizers by part.
            step: move the parameters, if the graph can.
        """
        if not (self.wanted and self.works):
            self._steps += 1
            return None
        moves = step and self.moves and all(type(own[name].optim.optimizer) is Adam for name in due)
        parts = {name: own[name] for name in due}
        for name, part in parts.items() if moves else ():
            if (who, name) not in self._collected:  # once: graphs of other parts that are due move the same tensors
                self._collected.add((who, name))
                part.optim.optimizer.collect(share=False)  # type: ignore[attr-defined]
        found = self._call((who, due, moves), partial(self._step, who, parts, moves), batch, self.varies)
        self.works = found is not None
        return found and Graph(**found)

    def call(self, function: Callable[[Batch], Batch], batch: Batch) -> Batch:
        """Return what a method returns, called as machine code once gradient steps are.

        Args:
            function: without side effects, but on tensors that it moves in place; always the same for its object.
        """
        found = self._call((function.__self__, function.__name__), function, batch) if self.wanted else None  # type: ignore[attr-defined]
        return function(batch) if found is None else found

    def _call(self, of: tuple[Any, ...], function: Callable[[Batch], Any], batch: Batch, varies: bool = False) -> Any:
        """Call a function as machine code, which is made if there is none; None: that does not work."""
        if of in self._failed:
            return None
        known = self._artifacts.setdefault(of, [])
        try:
            for artifact in known:
                if (found := artifact(batch)) is not None:
                    return found
            if len(known) == MOST_KINDS:
                raise RuntimeError(f"it would need more than {MOST_KINDS} graphs: shapes are ever new")
            known.append(artifact := Artifact(function, batch, varies))
            return artifact(batch)
        except Exception as error:  # of many kinds; one that is not the compiler's comes again without it
            self._failed.add(of)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            name, runs = type(of[0]).__name__, "gradient steps run eagerly"
            if isinstance(of[1], str):
                name, runs = f"{name}.{of[1]}", "it runs eagerly"
            warnings.warn(f"compile: {name} could not be compiled; {runs}: {reason}", stacklevel=2)
            return None

    def _step(self, who: Trainable, parts: Mapping[str, OptimizerState], moves: bool, batch: Batch) -> dict[str, Any]:
        """Compute what a ``Graph`` has."""
        total = self.forward(batch, who, tuple(parts))
        params = [p for part in parts.values() for p in part.params]
        left: Sequence[Any] = torch.autograd.grad(total.loss, params, allow_unused=True)
        losses, norms = total.losses, dict[str, Sequence[Tensor]]()
        found = {"terms": losses.terms, "metrics": losses.metrics, "feedback": losses.feedback, "norms": norms}
        if not moves:
            return found | {"count": total.count, "grads": left}
        with torch.no_grad():
            for name, part in parts.items():
                grads, left = left[: len(part.params)], left[len(part.params) :]
                norms[name] = part.clip([grad for grad in grads if grad is not None])
                part.optim.optimizer.move(grads)  # type: ignore[attr-defined]
        return found

    def state(self) -> Tree:
        return {"wanted": self.wanted, "works": self.works, "steps": self._steps, "since": self._since}

    def load(self, state: Tree) -> None:
        """Go on; graphs are made anew, as optimizers have another state."""
        self.wanted, self.works = self.wanted or state["wanted"], state.get("works", True)  # older ones lack it
        self._steps, self._since = state["steps"], state["since"]
        self._artifacts.clear()
        self._collected.clear()

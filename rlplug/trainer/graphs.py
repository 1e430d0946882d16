"""Gradient steps and whole updates as functions of a batch, which a compiler can call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rlplug.api import Losses, Trainable
from rlplug.compiler.compiler import Compiler
from rlplug.nn import Adam
from rlplug.trainer.minibatches import Total
from rlplug.trainer.optimizer import GradientStep, OptimizerState
from rlplug.types import Batch, Progress

Forward: TypeAlias = Callable[[Batch, Trainable, Sequence[str]], Total]


@dataclass
class Graph:
    """What a compiled gradient step returns: the losses, as means or sums, and what became of the gradients."""

    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]
    feedback: Batch
    norms: Mapping[str, Sequence[Tensor]]
    """of the gradients before they were clipped, by part; none where the graph moved nothing"""
    grads: Sequence[Tensor | None] = ()
    """of the parameters of the due parts; none where the graph moved them"""
    count: Tensor | float = 1.0
    """valid rows; unknown where the graph moved the parameters"""


def gradient_step(
    forward: Forward, who: Trainable, parts: Mapping[str, OptimizerState], moves: bool, batch: Batch
) -> dict[str, Any]:
    """Compute what a ``Graph`` has: forward and backward, and with ``moves`` clipping and the step of Adam."""
    total = forward(batch, who, tuple(parts))
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
            adam: Any = part.optim.optimizer
            (adam.move if is_compiling() else adam.apply)(grads)
    return found


class CompiledSteps:
    """Gradient steps as compiled functions of a batch.

    Args:
        varies: batches have one and another number of rows.
    """

    def __init__(self, compiler: Compiler, forward: Forward, varies: bool) -> None:
        self.compiler, self.forward, self.varies = compiler, forward, varies
        self._collected = set[tuple[Trainable, str]]()

    def __call__(self, batch: Batch, who: Trainable, parts: Mapping[str, OptimizerState], moves: bool) -> Graph | None:
        """Make a gradient step of the due ``parts``; None: it is not compiled.

        Args:
            moves: move the parameters, too, if their optimizers can.
        """
        moves = moves and all(type(part.optim.optimizer) is Adam for part in parts.values())
        for name, part in parts.items() if moves and self.compiler.active else ():
            if (who, name) not in self._collected:  # once: graphs of other parts that are due move the same tensors
                self._collected.add((who, name))
                part.optim.optimizer.collect(share=False)  # type: ignore[attr-defined]
        function = partial(gradient_step, self.forward, who, parts, moves)
        found = self.compiler.step((who, tuple(parts), moves), function, batch, self.varies)
        return found and Graph(**found)


class WholeUpdate:
    """An update as one function of a sample: what is prepared, its gradient steps, and what follows them.

    Python's part of an update (which optimizers are due, what is looked at later) is done here at every call, also
    where the function is a recording.

    Args:
        learn: makes the update.
        steps: gradient steps whose numbers have not been read; ``learn`` adds its own.
        optimizers: returns those that there are by now.
    """

    def __init__(
        self,
        compiler: Compiler,
        learn: Callable[[Batch], Losses],
        steps: list[GradientStep],
        optimizers: Callable[[], Iterable[OptimizerState]],
        progress: Progress,
    ) -> None:
        self.compiler, self.learn, self.steps = compiler, learn, steps
        self.optimizers, self.progress = optimizers, progress

    def __call__(self, batch: Batch) -> Losses:
        """Make the update of a sample, and return its losses."""
        self._begin = len(self.steps), [(optimizer, optimizer.calls) for optimizer in self.optimizers()]
        phases = tuple(calls % optimizer.optim.every for optimizer, calls in self._begin[1])
        found = self.compiler.call(self.function, batch, phases)
        for (optimizer, calls), more in zip(self._begin[1], found["calls"], strict=True):
            optimizer.calls = calls + more
        for who, terms, norms in found["steps"]:
            self.steps.append(GradientStep(self.progress.updates + 1, self.progress.env_steps, who, terms, norms))
        return Losses(found["terms"], found["metrics"], found["feedback"])

    def function(self, batch: Batch) -> dict[str, Any]:
        start, begin = self._begin
        del self.steps[start:]  # of an attempt that was not finished
        for optimizer, calls in begin:
            optimizer.calls = calls
        losses = self.learn(batch)
        steps = [
            (step.who, step.terms, {name: [torch.stack([*norms]).sum()] for name, norms in step.norms.items() if norms})
            for step in self.steps[start:]
        ]
        del self.steps[start:]
        found = {"terms": losses.terms, "metrics": losses.metrics, "feedback": losses.feedback, "steps": steps}
        return found | {"calls": [optimizer.calls - before for optimizer, before in begin]}

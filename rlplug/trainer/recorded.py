"""Whole updates as functions of a sample, which a device records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlplug.api import Losses
from rlplug.trainer.optimizer import GradientStep
from rlplug.trainer.steps import GradientSteps
from rlplug.types import Batch


class WholeUpdate:
    """An update as one function of a sample: what is prepared, its gradient steps, and what follows them.

    Python's part of an update (which optimizers are due, what is looked at later) is done here at every call, also
    where the function is a recording.

    Args:
        learn: makes the update.
        steps: its gradient steps.
    """

    def __init__(self, learn: Callable[[Batch], Losses], steps: GradientSteps) -> None:
        self.learn, self.steps = learn, steps

    def __call__(self, batch: Batch) -> Losses:
        """Make the update of a sample, and return its losses."""
        steps, progress = self.steps, self.steps.progress
        self._begin = len(steps.unread), [(optimizer, optimizer.calls) for optimizer in steps.optimizers()]
        phases = tuple(calls % optimizer.optim.every for optimizer, calls in self._begin[1])
        found = steps.compiler.call(self.function, batch, phases)
        for (optimizer, calls), more in zip(self._begin[1], found["calls"], strict=True):
            optimizer.calls = calls + more
        for who, terms, norms in found["steps"]:
            steps.unread.append(GradientStep(progress.updates + 1, progress.env_steps, who, terms, norms))
        return Losses(*found["losses"])

    def function(self, batch: Batch) -> dict[str, Any]:
        (start, begin), unread = self._begin, self.steps.unread
        del unread[start:]  # of an attempt that was not finished
        for optimizer, calls in begin:
            optimizer.calls = calls
        losses = self.learn(batch)
        steps = [
            (step.who, step.terms, {name: [torch.stack([*norms]).sum()] for name, norms in step.norms.items() if norms})
            for step in unread[start:]
        ]
        del unread[start:]
        found = {"losses": [losses.terms, losses.metrics, losses.feedback], "steps": steps}
        return found | {"calls": [optimizer.calls - before for optimizer, before in begin]}

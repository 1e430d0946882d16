"""Gradient steps whose numbers are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplug.api import Trainable
from rlplug.collection.nonfinite import kind


class GradientStep(NamedTuple):
    """A gradient step, and the 0-d numbers that say whether it can be trusted."""

    update: int
    env_steps: int
    who: Trainable
    terms: Mapping[str, Tensor]
    norms: Mapping[str, Sequence[Tensor]]
    """of the gradient, by part; one too large for float32 counts as infinite"""

    def numbers(self) -> list[Tensor]:
        return [*self.terms.values(), *(norm for norms in self.norms.values() for norm in norms)]

    def names(self) -> Iterator[str]:
        yield from (f"the loss term {name!r}" for name in self.terms)
        for part, norms in self.norms.items():
            yield from (f"the gradient of part {part!r}" for _ in norms)


def find_nonfinite(steps: Sequence[GradientStep]) -> str | None:
    """What the first number is that is not finite, and in which step; None if there is none. Reads once."""
    numbers = [x for step in steps for x in step.numbers()]
    read = torch.stack(numbers).tolist() if numbers else []
    if all(map(math.isfinite, read)):
        return None
    named = ((name, step) for step in steps for name in step.names())
    name, step, x = next((*of, x) for of, x in zip(named, read, strict=True) if not math.isfinite(x))
    place = f"update {step.update}, environment step {step.env_steps}"
    return f"{type(step.who).__name__}: {name} is {kind(x)} at {place}"

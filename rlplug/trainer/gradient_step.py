"""Gradient steps whose numbers are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def find_nonfinite(steps: Sequence[GradientStep]) -> str | None:
    """Describe the first number that is not finite; None if there is none. Reads from the device once."""
    named: list[tuple[Tensor, str, GradientStep]] = []
    for step in steps:
        named += [(x, f"the loss term {name!r}", step) for name, x in step.terms.items()]
        named += [(x, f"the gradient of part {part!r}", step) for part, norms in step.norms.items() for x in norms]
    values = torch.stack([x for x, _, _ in named]).tolist() if named else []
    for value, (_, name, step) in zip(values, named, strict=True):
        if not math.isfinite(value):
            place = f"update {step.update}, environment step {step.env_steps}"
            return f"{type(step.who).__name__}: {name} is {kind(value)} at {place}"
    return None

"""What a gradient step needs beside gradients: optimizers, whether its numbers are finite, and a scale for float16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Optim, Trainable
from rlplug.collection.nonfinite import kind
from rlplug.nn.optim import clip
from rlplug.types import Tree

LARGEST = 2.0**24  # the largest scale of losses


class OptimizerState:
    """The optimizer of one part of a trainable."""

    def __init__(self, optim: Optim) -> None:
        self.optim, self.calls = optim, 0
        self.params: list[Tensor] = [p for group in optim.optimizer.param_groups for p in group["params"]]
        self._follow_schedule()

    def due(self) -> bool:
        """Count a call; every ``optim.every``-th is due."""
        self.calls += 1
        return self.calls % self.optim.every == 0

    def clip(self, grads: list[Tensor] | None = None) -> Sequence[Tensor]:
        """Clip ``grads``, or every ``.grad`` that there is, in place; see ``nn.clip``."""
        grads = [p.grad for p in self.params if p.grad is not None] if grads is None else grads
        return clip(grads, self.optim.grad_clip, self.optim.grad_clip_by)

    def state(self) -> Tree:
        return {"optimizer": self.optim.optimizer.state_dict(), "calls": self.calls}

    def load(self, state: Tree) -> None:
        refuse_nan(("the optimizer", leaf) for _, leaf in tree.items(state["optimizer"]))
        self.calls = state["calls"]
        self.optim.optimizer.load_state_dict(state["optimizer"])
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        """Let the optimizer read its step size from the schedule's tensor."""
        if self.optim.lr is not None:
            for group in self.optim.optimizer.param_groups:
                group["lr"] = self.optim.lr


def refuse_nan(learned: Iterable[tuple[object, object]]) -> None:
    """Raise ``ValueError`` at the first of pairs (name, tensor) that holds NaN, which buffers may: pass none."""
    for name, value in learned:
        if isinstance(value, Tensor) and value.isnan().any():
            raise ValueError(f"{name} holds NaN")


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
    tensors = [x for x, _, _ in named]
    here = all(x.is_cpu for x in tensors)
    values = [x.item() for x in tensors] if here else torch.stack(tensors).tolist()
    for value, (_, name, step) in zip(values, named, strict=True):
        if not math.isfinite(value):
            place = f"update {step.update}, environment step {step.env_steps}"
            return f"{type(step.who).__name__}: {name} is {kind(value)} at {place}"
    return None


class LossScale:
    """The factor of the loss that is differentiated: halved after an overflow, doubled after many steps without.

    Gradients in float16 vanish below 6e-8 and overflow above 65504: Micikevicius et al. 2018 (arXiv:1710.03740),
    section 3.2. One scale serves all optimizers, whose losses are differentiated together. All ranks see the same
    gradients, and so keep the same scale.

    Args:
        start: a power of two, so that gradients divided by it are exact.
        patience: steps without an overflow after which it is doubled.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.patience, self.fine = patience, 0

    def fits(self, step: GradientStep) -> bool:
        """Return False after an overflow. Reads the step's numbers, for which an accelerator has to wait.

        A number that is not finite for another reason (a loss term, or a gradient at scale 1) is left to others.
        """
        if find_nonfinite([step]) is None:
            self.fine = (self.fine + 1) % self.patience
            if self.fine == 0:
                self.value.mul_(2.0).clamp_(max=LARGEST)
            return True
        if find_nonfinite([step._replace(norms={})]) is not None or self.value <= 1.0:
            return True
        self.value.div_(2.0)
        self.fine = 0
        return False

    def state(self) -> Tree:
        return {"value": self.value, "fine": self.fine}

    def load(self, state: Tree) -> None:
        self.value.copy_(state["value"])
        self.fine = state["fine"]

"""State of optimizers, and checks for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Optim, Trainable
from rlplug.collection.nonfinite import kind
from rlplug.nn.optim import clip, load_checked, replaced
from rlplug.types import Tree


class OptimizerState:
    """The optimizer of one part of a trainable, with its schedule and call counter.

    Args:
        chosen: name and options of an optimizer in the place of ``nn.Adam``; see ``nn.optim.replaced``.
    """

    def __init__(self, optim: Optim, *chosen: Any) -> None:
        optim.optimizer = replaced(optim.optimizer, *chosen)
        self.optim, self.calls = optim, 0
        self.params: list[Tensor] = [p for group in optim.optimizer.param_groups for p in group["params"]]
        self._follow_schedule()
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in optim.optimizer.param_groups]

    def due(self) -> bool:
        """Count a call, and return whether the number of calls is a multiple of ``optim.every``."""
        self.calls += 1
        return self.calls % self.optim.every == 0

    def clip(self, grads: list[Tensor] | None = None) -> Sequence[Tensor]:
        """Clip ``grads``, or all existing ``.grad``, in place; see ``nn.clip``."""
        grads = [p.grad for p in self.params if p.grad is not None] if grads is None else grads
        return clip(grads, self.optim.grad_clip, self.optim.grad_clip_by)

    def state(self) -> Tree:
        options = [tree.map(repr, group) for group in self._options]
        return {"optimizer": self.optim.optimizer.state_dict(), "calls": self.calls, "options": options}

    def load(self, state: Tree) -> None:
        refuse_nan(("the optimizer", leaf) for _, leaf in tree.items(state["optimizer"]))
        self.calls = state["calls"]
        load_checked(self.optim.optimizer, state["optimizer"])
        for group, own, saved in zip(self.optim.optimizer.param_groups, self._options, state["options"], strict=True):
            group.update({key: value for key, value in own.items() if repr(value) != saved[key]})  # changed by a fork
            if wrong := [key for key, value in own.items() if _type(group[key]) != _type(value)]:
                raise ValueError(f"{wrong[0]} of an optimizer is {group[wrong[0]]!r}")
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        """Bind the optimizer's step size to the schedule's tensor."""
        for i, group in enumerate(self.optim.optimizer.param_groups):
            if (lr := self.optim.lr) is not None:
                group["lr"] = lr if isinstance(lr, Tensor) else lr[i]


def _type(option: Any) -> Any:
    return [type(part) for part in option] if isinstance(option, list | tuple) else type(option)


def refuse_nan(learned: Iterable[tuple[object, object]]) -> None:
    """Raise ``ValueError`` for the first pair (name, tensor) with NaN. Do not pass buffers, which may have NaN."""
    for name, value in learned:
        if isinstance(value, Tensor) and value.isnan().any():
            raise ValueError(f"{name} holds NaN")


class GradientStep(NamedTuple):
    """A gradient step with 0-d numbers that show whether it is finite."""

    update: int
    env_steps: int
    who: Trainable
    terms: Mapping[str, Tensor]
    norms: Mapping[str, Sequence[Tensor]]
    """gradient norms by part; a norm too large for float32 counts as infinite"""


def find_nonfinite(steps: Sequence[GradientStep]) -> str | None:
    """Describe the first number that is not finite, or return None. Synchronizes with the device once."""
    named: list[tuple[Tensor, str, GradientStep]] = []
    for step in steps:
        named += [(x, f"the loss term {name!r}", step) for name, x in step.terms.items()]
        named += [(x, f"the gradient of part {part!r}", step) for part, norms in step.norms.items() for x in norms]
    tensors = [x for x, _, _ in named]
    values = [x.item() for x in tensors] if all(x.is_cpu for x in tensors) else torch.stack(tensors).tolist()
    for value, (_, name, step) in zip(values, named, strict=True):
        if not math.isfinite(value):
            place = f"update {step.update}, environment step {step.env_steps}"
            return f"{type(step.who).__name__}: {name} is {kind(value)} at {place}"
    return None

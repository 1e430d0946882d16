"""Parity checks: the first calls of a compiled function are compared with eager ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplug.compiler.compiled import Compiled, Function
from rlplug.types import Batch

CALLS = 3
SHARE = 0.95  # fraction of the updated numbers that have to agree
CHANGE = 0.05
"""relative tolerance of a number's change: Adam amplifies rounding errors of tiny gradients"""
NOISE = 1e-3  # changes below this fraction of the RMS change of their tensor are rounding
ROUNDING = 1e-5


class Writes(TorchDispatchMode):
    """Saves the previous values of tensors that operations write to, except tensors created meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor and a copy
        self._made = set[int]()  # memory allocated meanwhile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        writes = [spec.name for spec in func._schema.arguments if spec.alias_info and spec.alias_info.is_write]
        written = [given[name] for name in writes if name in given]
        for x in _tensors(written):
            if id(x) not in self.before and not _memory(x) <= self._made:
                self.before[id(x)] = x, x.detach().clone()
        returned = func(*args, **kwargs)
        if not written:
            self._made |= _memory(returned) - _memory((args, kwargs))
        return returned


def _memory(value: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in _tensors(value)}


class Checked:
    """A compiled function whose first calls are compared with eager ones on equal inputs, weights and generators.

    Args:
        generators: generators that it draws from.
        tolerance: tolerance of its results, relative to their norm.
    """

    def __init__(
        self, compiled: Compiled, function: Function, generators: Iterable[torch.Generator], tolerance: float
    ) -> None:
        self.compiled, self.function, self.tolerance, self.left = compiled, function, tolerance, CALLS
        self.generators = [*generators]
        self.difference: str | None = None
        """difference from the eager function; state is then that of the eager call"""

    def __call__(self, batch: Batch) -> Any:
        """Return the compiled result, or the eager one if they differ; None: it does not support the batch."""
        if (inputs := self.compiled.inputs(batch)) is None:
            return None
        self.left -= 1
        drawn = self._drawn()
        with Writes() as writes:
            expected = self.function(batch)
        tensors, before = ([pair[i] for pair in writes.before.values()] for i in range(2))
        after, returned = ([x.detach().clone() for x in of] for of in (tensors, _tensors(expected)))
        then = self._drawn()
        self._go_back(tensors, before, drawn)
        found = self.compiled.run(inputs)
        self.difference = _returns(returned, _tensors(found), self.tolerance) or _moves(before, after, tensors)
        if self.difference is None and not all(map(torch.equal, then, self._drawn())):
            self.difference = "it draws different random numbers"
        if self.difference is None:
            return found
        self._go_back(tensors, after, then)
        return expected

    def _drawn(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def _go_back(self, tensors: Sequence[Tensor], values: Sequence[Tensor], drawn: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        for generator, state in zip(self.generators, drawn, strict=True):
            generator.set_state(state)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _returns(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float) -> str | None:
    """Describe the difference of returned tensors; None: only rounding."""
    for x, y in zip(expected, found, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"it returns {y.dtype}{[*y.shape]} instead of {x.dtype}{[*x.shape]}"
        if not x.is_floating_point():
            share = (x != y).double().mean().item() if x.numel() else 0.0
            if share > 1.0 - SHARE:
                return f"{share:.0%} of the numbers that it returns are different"
        elif (off := _norm(x - y)) > tolerance * _norm(x) + ROUNDING * x.numel() ** 0.5:
            return f"its outputs differ by {off / max(_norm(x), ROUNDING):.1g} of their norm"
    return None


def _norm(x: Tensor) -> float:
    return x.double().nan_to_num(0.0, 0.0, 0.0).norm().item()


def _moves(before: Sequence[Tensor], expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """Describe the fraction of updated numbers that differ; None: few."""
    agree, every = 0, 0
    for x, y, z in zip(before, expected, found, strict=True):
        x, y, z = (value.detach().double().nan_to_num() for value in (x, y, z))
        change = (y - x).abs()
        noise = NOISE * change.square().mean().sqrt() + ROUNDING * x.abs()
        agree, every = agree + int(((z - y).abs() <= CHANGE * change + noise).sum()), every + x.numel()
    share = 1.0 - agree / every if every else 0.0
    return f"{share:.0%} of the numbers that it updates are different" if share > 1.0 - SHARE else None

"""Find attributes of components that are not parameters or registered buffers, and so not in a checkpoint."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor, nn

from rlplug.api import Segment
from rlplug.context import EnvShard, RunContext
from rlplug.registry import hookimpl
from rlplug.testing.checks.memory import addresses
from rlplug.testing.checks.runs import differences, some
from rlplug.trainer.trainer import Trainer

OTHERS = (
    *(RunContext, EnvShard, Space, torch.optim.Optimizer, type, ModuleType),
    *(FunctionType, MethodType, BuiltinFunctionType),
)
"""objects without their own state"""
OF_TORCH = frozenset(vars(nn.Module()))
"""attributes of every module: parameters, buffers and children, which are visited, and hooks"""


def components(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that may hold state of a run, by class name."""
    every = (trainer.algorithm, *trainer.policy.exploration.values(), trainer.policy.curriculum, trainer.loop)
    return {type(who).__name__: who for who in every if who is not None}


def kept(trainer: Trainer) -> dict[str, Any]:
    """Return numbers, strings, arrays and tensors in attributes of a run's components: ``{"PPO.calls": 3}``."""
    return {f"{name}.{path}": leaf for name, who in components(trainer).items() for path, leaf in attributes(who)}


def attributes(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the leaves of an object's attributes, including nested objects and containers.

    Persistent buffers and parameters of registered submodules are excluded; those of hidden modules, such as in a list,
    are included.
    """
    registered = set[int]()
    if isinstance(root, nn.Module):
        registered = {id(leaf) for leaf in (*root.parameters(), *_persistent(root))}
    yield from _visit(root, "", registered, set())


def _persistent(root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


def _visit(thing: Any, path: str, registered: set[int], seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, OTHERS) or id(thing) in registered:
        return
    if thing is None or isinstance(
        thing, bool | int | float | complex | str | bytes | Tensor | np.ndarray | np.generic
    ):
        yield path, thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if (state := _dice(thing)) is not None:
        yield path, state
        return
    for name, inner in _inside(thing):
        yield from _visit(inner, f"{path}.{name}".strip("."), registered, seen)


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        yield from ((str(key), value) for key, value in thing.items())
        if type(thing) in (dict, Mapping):
            return
    elif isinstance(thing, list | tuple | deque):
        yield from ((str(i), value) for i, value in enumerate(thing))
    elif isinstance(thing, set | frozenset):
        yield "", repr(sorted(map(repr, thing)))
    elif isinstance(thing, nn.Module):
        for group in (thing._parameters, thing._buffers, thing._modules):
            yield from group.items()
        yield from ((name, value) for name, value in vars(thing).items() if name not in OF_TORCH)
        return
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(thing, name)]
    yield from own.items()
    yield from ((name, getattr(thing, name)) for name in slots if isinstance(name, str) and name not in own)
    if not own and not slots and " at 0x" not in (said := repr(thing)):  # such as itertools.count(3)
        yield "", said


def _dice(thing: Any) -> Any:
    """Return the state of a random number generator, or None for other objects."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return repr(thing.getstate())
    return repr(thing.bit_generator.state) if isinstance(thing, np.random.Generator) else None


def lost(undisturbed: Trainer, resumed: Trainer) -> str:
    """Describe the attributes that differ between two runs that should be equal; empty if none does."""
    one, two = kept(undisturbed), kept(resumed)
    names = differences(one, two)
    if not names:
        return ""
    first = names[0]
    a, b = (_short(of[first]) if first in of else "nothing" for of in (one, two))
    more = f"; so do {some(names[1:])}" if names[1:] else ""
    return (
        f"{first} differs: it is {a} in an undisturbed run, and {b} in one that was resumed, since a checkpoint holds"
        f" what state_dict() does{more}"
    )


def _short(leaf: Any) -> str:
    if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
        return f"an array {list(leaf.shape)} of other numbers"
    said = repr(leaf.item() if isinstance(leaf, Tensor) else leaf)
    return said if len(said) <= 40 else f"{said[:40]}..."


class Lent:
    """A hook that records the memory of segments, which collectors reuse."""

    def __init__(self) -> None:
        self.addresses = set[int]()

    @hookimpl
    def rlplug_collected(self, run: Any, segment: Segment) -> None:
        self.addresses |= addresses(segment.batch).keys()

    def held(self, trainer: Trainer) -> list[str]:
        """Return the attributes of components that refer to this memory."""
        leaves = ((name, leaf) for name, leaf in kept(trainer).items() if isinstance(leaf, Tensor | np.ndarray))
        return [name for name, leaf in leaves if addresses([leaf]).keys() & self.addresses]

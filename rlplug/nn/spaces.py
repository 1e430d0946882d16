"""Observations of any space as one flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlplug import host
from rlplug.spaces import Hybrid
from rlplug.types import ConfigError

Path: TypeAlias = tuple[str, ...]
"""keys of a part of a Dict or Tuple space"""

MOST_ONE_HOT = 10_000
"""number of choices of a Discrete part above which a network learns an embedding"""


class Flatten:
    """Converts a tree of ``space`` with any leading axes to ``[..., size]`` float32.

    Box and MultiBinary: trailing axes flattened, bytes and images from 0 to 255 divided by 255; Discrete and
    MultiDiscrete, which count from 0: one-hot; Hybrid: both parts; Dict and Tuple: parts concatenated in the order of
    the space. A flat float32 Box is returned unchanged. Sizes are read once, since ``torch.compile`` does not support a
    space's NumPy integers.

    Args:
        embed: encode parts with more than ``MOST_ONE_HOT`` choices by learned embeddings, whose dimension is the fourth
            root of the number of choices. The owner registers ``tables`` as modules.

    Raises:
        ConfigError: the space is not supported.
    """

    def __init__(self, space: spaces.Space[Any], embed: bool = False) -> None:
        self.shape = space.shape or ()
        self.parts: list[tuple[Any, Flatten]] = []
        self.choices: list[int] = []
        self.bytes = self.image = False
        self.numbers = 0
        match space:
            case spaces.Box():
                self.bytes = space.dtype == np.uint8 and bool((space.high == 255).all())
                self.image = len(self.shape) == 3 and reaches_255(space)
            case spaces.MultiBinary():
                pass
            case spaces.Discrete():
                self.choices = [int(space.n)]
            case spaces.MultiDiscrete():
                self.choices = space.nvec.ravel().tolist()
            case Hybrid():
                self.numbers, self.choices = space.size, space.discrete.nvec.tolist()
            case spaces.Dict():
                self.parts = [(key, Flatten(sub, embed)) for key, sub in space.spaces.items()]
            case spaces.Tuple():
                self.parts = [(i, Flatten(sub, embed)) for i, sub in enumerate(space.spaces)]
            case _:
                served = "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
                raise ConfigError("env.id", f"{space} has no flat form; supported are {served}")
        large = [n > MOST_ONE_HOT and embed for n in self.choices]
        self._tables = [nn.Embedding(n, width_of(n)) if it else None for n, it in zip(self.choices, large, strict=True)]
        widths = [width_of(n) if it else n for n, it in zip(self.choices, large, strict=True)]
        flat = self.numbers + sum(widths) or math.prod(self.shape)
        self.size = sum(part.size for _, part in self.parts) or flat

    @property
    def tables(self) -> list[nn.Embedding]:
        """Return all embeddings; empty unless ``embed`` and a part has more than ``MOST_ONE_HOT`` choices."""
        inside = [table for _, part in self.parts for table in part.tables]
        return inside + [table for table in self._tables if table is not None]

    def __call__(self, x: Any) -> Tensor:
        """Flatten ``x``: leading axes, then the shape of the space; a dict or sequence of these for Dict and Tuple.

        Raises:
            ValueError: the trailing axes do not match the space.
        """
        if self.parts:
            return torch.cat([part(x[key]) for key, part in self.parts], -1)
        if len(self.shape) != 1:
            x = self._flat_event(x)
        if not self.choices:
            return x / 255.0 if self.image or (self.bytes and x.dtype == torch.uint8) else x.float()
        numbers, chosen = ([x[..., : self.numbers]], x[..., self.numbers :]) if self.numbers else ([], x)
        columns = list(zip(chosen.long().unbind(-1), self.choices, self._tables, strict=True))
        flat = [_one_hot(c, n).float() if table is None else table(c) for c, n, table in columns]
        return torch.cat([*numbers, *flat], -1)

    def _flat_event(self, x: Tensor) -> Tensor:
        lead = x.ndim - len(self.shape)
        if lead < 0 or x.shape[lead:] != self.shape:
            raise ValueError(f"expected [..., {', '.join(map(str, self.shape))}], got {list(x.shape)}")
        return x.reshape(*x.shape[:lead], math.prod(self.shape))


def parts_of(space: spaces.Space[Any], path: Path = ()) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    """Yield the parts of a Dict or Tuple, also nested, with their keys; a single space is one part."""
    match space:
        case spaces.Dict():
            for key, part in space.spaces.items():
                yield from parts_of(part, (*path, key))
        case spaces.Tuple():
            for i, part in enumerate(space.spaces):
                yield from parts_of(part, (*path, str(i)))
        case _:
            yield path, space


def part_at(x: Any, path: Path) -> Any:
    """Return the part of an observation ``x``, leaves ``[...]``, at ``path``."""
    for key in path:
        x = x[key] if isinstance(x, dict) else x[int(key)]
    return x


def _one_hot(x: Tensor, n: int) -> Tensor:
    """Return ``[..., n]`` of ``x [...]``; torch's function reads the maximum, which synchronizes with a device."""
    if host.reads_freely(x):
        return one_hot(x, n)
    return x.unsqueeze(-1) == torch.arange(n, device=x.device)


def reaches_255(space: spaces.Box) -> bool:
    """Return whether all numbers range from 0 to 255, and are not uint8."""
    return space.dtype != np.uint8 and bool((space.low == 0).all() and (space.high == 255).all())


def width_of(choices: int) -> int:
    """Return the embedding dimension for this many choices."""
    return round(choices**0.25)


def remarks(space: spaces.Space[Any], name: str = "observation") -> list[str]:
    """Return notes on how models encode such observations, one line each."""
    match space:
        case spaces.Dict():
            return [line for key, sub in space.spaces.items() for line in remarks(sub, f"{name}[{key!r}]")]
        case spaces.Box() if math.prod(space.shape) and reaches_255(space):
            if len(space.shape) == 3:
                way = "are divided by 255, as bytes are; of type uint8 they take less memory"
                return [f"{name}: pixels from 0 to 255 of type {space.dtype} {way}"]
            way = (
                "go into networks as they are; uint8 is divided by 255, preprocess.normalize_obs=true normalizes floats"
            )
            return [f"{name}: numbers from 0 to 255 of type {space.dtype} {way}"]
        case spaces.Discrete() | spaces.MultiDiscrete():
            large = {n: width_of(n) for n in choices_of(space) or () if n > MOST_ONE_HOT}
            how = f"not one-hot, as up to {MOST_ONE_HOT:,} are: model=mlp learns a table"
            return [
                f"{name}: {n:,} choices, {how} of {w} numbers for each, {n * w:,} weights" for n, w in large.items()
            ]
    return []


def choices_of(space: spaces.Space[Any]) -> list[int] | None:
    """Return the number of choices of each part of an action of ``space``; None if actions are not discrete."""
    match space:
        case spaces.Discrete():
            return [int(space.n)]
        case spaces.MultiDiscrete():
            return space.nvec.ravel().tolist()
        case spaces.MultiBinary():
            return [2] * math.prod(space.shape)
    return None


def as_executed(space: spaces.Space[Any], action: Tensor) -> Tensor:
    """Return actions ``[..., *shape]`` with bounded numbers clipped to [-1, 1], as environments clip them."""
    if isinstance(space, Hybrid) and space.is_bounded():
        return torch.cat((action[..., : space.size].clamp(-1.0, 1.0), action[..., space.size :]), -1)
    return action.clamp(-1.0, 1.0) if isinstance(space, spaces.Box) and space.is_bounded() else action


def flat_size(space: spaces.Space[Any]) -> int:
    """Return the length of the vector that ``flatten`` returns for one element.

    Raises:
        ConfigError: the space is not supported.
    """
    return Flatten(space).size


def flatten(space: spaces.Space[Any], x: Any) -> Tensor:
    """Return ``Flatten(space)(x)``, ``[..., size]``, for single calls; a network keeps a ``Flatten``."""
    return Flatten(space)(x)

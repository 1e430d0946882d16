"""Observations of any space as one flat vector."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot

from rlplug import host
from rlplug.types import ConfigError


class Flatten:
    """Turns a tree of ``space`` with any leading axes into ``[..., size]`` float32.

    Box and MultiBinary: trailing axes flattened, bytes from 0 to 255 divided by 255; Discrete and MultiDiscrete,
    which count from 0: one-hot; Dict and Tuple: their parts one behind the other, in the order of the space. A flat
    float32 Box passes through untouched. The sizes are read once, since NumPy integers of a space stop
    ``torch.compile``.

    Raises:
        ConfigError: the space is none of these.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.shape = space.shape or ()
        self.parts: list[tuple[Any, Flatten]] = []
        self.choices: list[int] = []
        self.bytes = False
        match space:
            case spaces.Box():
                self.bytes = space.dtype == np.uint8 and bool((space.high == 255).all())
            case spaces.MultiBinary():
                pass
            case spaces.Discrete():
                self.choices = [int(space.n)]
            case spaces.MultiDiscrete():
                self.choices = space.nvec.ravel().tolist()
            case spaces.Dict():
                self.parts = [(key, Flatten(sub)) for key, sub in space.spaces.items()]
            case spaces.Tuple():
                self.parts = [(i, Flatten(sub)) for i, sub in enumerate(space.spaces)]
            case _:
                served = "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
                raise ConfigError("env.id", f"{space} has no flat form; served are {served}")
        self.size = sum(part.size for _, part in self.parts) or sum(self.choices) or math.prod(self.shape)

    def __call__(self, x: Any) -> Tensor:
        """Flatten ``x``: leading axes, then the shape of the space; a dict or sequence of such for Dict and Tuple.

        Raises:
            ValueError: the trailing axes are not those of the space.
        """
        if self.parts:
            return torch.cat([part(x[key]) for key, part in self.parts], -1)
        if len(self.shape) != 1:
            x = self._flat_event(x)
        if not self.choices:
            return x / 255.0 if self.bytes and x.dtype == torch.uint8 else x.float()
        columns = x.long().unbind(-1)
        return torch.cat([_one_hot(c, n) for c, n in zip(columns, self.choices, strict=True)], -1).float()

    def _flat_event(self, x: Tensor) -> Tensor:
        lead = x.ndim - len(self.shape)
        if lead < 0 or x.shape[lead:] != self.shape:
            raise ValueError(f"expected [..., {', '.join(map(str, self.shape))}], got {list(x.shape)}")
        return x.reshape(*x.shape[:lead], math.prod(self.shape))


def _one_hot(x: Tensor, n: int) -> Tensor:
    """Return ``[..., n]`` of ``x [...]``; torch's function reads the largest, for which the host would wait."""
    if host.reads_freely(x):
        return one_hot(x, n)
    return x.unsqueeze(-1) == torch.arange(n, device=x.device)


def choices_of(space: spaces.Space[Any]) -> list[int] | None:
    """Count the choices of each part of an action of ``space``; None where actions are not discrete."""
    match space:
        case spaces.Discrete():
            return [int(space.n)]
        case spaces.MultiDiscrete():
            return space.nvec.ravel().tolist()
        case spaces.MultiBinary():
            return [2] * math.prod(space.shape)
    return None


def flat_size(space: spaces.Space[Any]) -> int:
    """Return the length of the vector that ``flatten`` makes of one element.

    Raises:
        ConfigError: as ``Flatten``.
    """
    return Flatten(space).size


def flatten(space: spaces.Space[Any], x: Any) -> Tensor:
    """Return ``Flatten(space)(x)``, ``[..., size]``, for once; a network keeps a ``Flatten``."""
    return Flatten(space)(x)

"""Streams of numbered rows, and variants of a buffer to store them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np
import torch
from gymnasium import spaces

from rlplug import tree
from rlplug.api import Buffer, Data, Needs, Window
from rlplug.config import Chosen, choose
from rlplug.context import RunContext
from rlplug.registry import load
from rlplug.testing.checks.runs import node_of, option_of, require
from rlplug.testing.context import context, spec
from rlplug.types import Batch, ConfigError, EnvSpec, EnvTraits

COLUMNS, ROWS, SAMPLES, CAPACITY = 5, 4, 16, 120
CAPACITIES: dict[Data, int] = {"segments": 20, "episodes": CAPACITY * COLUMNS}


class Stream:
    """Numbered rows: row ``i`` of column ``b`` holds ``i * COLUMNS + b``; episodes have different lengths, and gaps.

    Column 0 is one long episode, the last column has stretches of rows that are not valid.

    Args:
        stack: observations are images of this many frames, oldest first. In an episode's first rows, some columns pad
            missing frames with zeros, others with the first frame. 0: vectors.
        whole: every episode ends, and has no gaps.
        goals: observations have goals, which are vectors.
    """

    def __init__(self, length: int, stack: int = 0, whole: bool = False, goals: bool = False) -> None:
        dice = np.random.default_rng(0)
        number = np.arange(length * COLUMNS).reshape(length, COLUMNS)
        final = np.zeros((length, COLUMNS), np.bool_)
        for column in range(not whole, COLUMNS):
            at = 0
            while at < length:
                at += int(dice.integers(1, 9))
                final[at : at + 1, column] = True
                at += 1
        valid = ~final
        if not whole:
            valid[:, -1] &= np.arange(length) % 17 < 11
        first = np.zeros_like(final)
        first[0], first[1:] = True, final[:-1]
        ended = np.zeros_like(final)
        ended[:-1] = final[1:]
        obs = np.repeat(number[..., None], 3, -1).astype(np.float32)
        parts = {"observation": obs, "achieved_goal": obs, "desired_goal": -obs}
        rows = {
            "obs": _stacked(number, first, stack) if stack else parts if goals else obs,
            "action": number,
            "reward": number.astype(np.float32),
            "terminated": ended & (number % 2 == 0),
            "truncated": ended & (number % 2 == 1),
            "is_first": first,
            "valid": valid,
            "carry": {"q": {"h": obs[..., :2], "c": obs}},
        }
        self.rows: Batch = tree.map(torch.from_numpy, rows)
        self.memory: Batch = {}

    def segment(self, start: int, carry: bool = False) -> Batch:
        """Return rows ``start`` to ``start + ROWS``, in the same memory every time, like a collector."""
        fresh = tree.map(lambda leaf: leaf[start : start + ROWS + 1].clone(), self.rows)
        fresh["valid"][-1] = False
        self.memory = self.memory or fresh
        for into, leaf in zip(tree.leaves(self.memory), tree.leaves(fresh), strict=True):
            into.copy_(leaf)
        return {key: leaf for key, leaf in self.memory.items() if carry or key != "carry"}


def _stacked(number: Any, first: Any, stack: int) -> Any:
    """Return compressible frames that encode their number, ``[length, COLUMNS, stack, 16, 16]``."""
    frames = np.zeros((*number.shape, 16, 16), np.uint8)
    frames[..., 0, :2] = np.stack([number // 256, number % 256], -1)
    frames[..., 5:9, 3:12] = (number % 251)[..., None, None]
    stacks = np.zeros((*number.shape, stack, 16, 16), np.uint8)
    for row, column in np.ndindex(number.shape):
        new = frames[row, column]
        if first[row, column]:
            stacks[row, column, :-1] = new if column % 2 else 0
        else:
            stacks[row, column, :-1] = stacks[row - 1, column, 1:]
        stacks[row, column, -1] = new
    return stacks


class Variant:
    """A buffer for ``COLUMNS`` environments, with a small capacity if it has one.

    Args:
        data: kind of its samples; None: the first that it supports.
        off_policy: whether the algorithm is off-policy.
        stack: see ``Stream``.
        changes: changes of the buffer's options.
    """

    def __init__(
        self, name: str, window: int, stack: int = 0, data: Data | None = None, off_policy: bool = False, **changes: Any
    ) -> None:
        self.cls, self.stack = load("buffer", name), stack
        gives: Any = getattr(self.cls, "gives", None)
        require(
            isinstance(gives, frozenset) and gives and gives <= set(get_args(Data)),
            f"set gives = frozenset of some of {', '.join(get_args(Data))}",
        )
        require(
            isinstance(getattr(self.cls, "sequences", None), bool),
            "set sequences = True (windows begin at rows whose recurrent state is kept) or False",
        )
        self.data: Data = data or min(gives)
        self.drawn = off_policy or self.data == "windows"
        """rows can be sampled repeatedly; otherwise each row is returned once"""
        self.node = node_of("buffer", option_of("buffer", name))
        self.node |= ({"capacity": CAPACITIES.get(self.data, CAPACITY)} if "capacity" in self.node else {}) | changes
        self.goals = not stack and not self.serves(spec(3, 2))
        self.carries = self.cls.sequences or self.data != "windows"
        keys = ("obs", "action", "carry") if self.carries else ("obs", "action")
        window = window if self.data in ("windows", "rollout") else 1
        self.needs = Needs(Window(window), data=self.data, off_policy=self.drawn, keys=keys)
        if self.cls.sequences:
            self.needs = replace(self.needs, window=Window(window, 2, 3))

    @property
    def chosen(self) -> Chosen:
        return choose("buffer", "buffer", self.node)

    def serves(self, of: EnvSpec) -> bool:
        """Return whether it accepts these spaces."""
        try:
            self.chosen.reads(of)
        except ConfigError:
            return False
        return True

    @property
    def spec(self) -> EnvSpec:
        if self.stack:
            return replace(spec(spaces.Box(0, 255, (self.stack, 16, 16), np.uint8), 2), frame_stack=self.stack)
        vector = spec(3, 2).single_agent.obs
        parts: dict[str, spaces.Space[Any]] = {"observation": vector, "achieved_goal": vector, "desired_goal": vector}
        return spec(spaces.Dict(parts) if self.goals else vector, 2)

    def context(self) -> RunContext:
        sizes = {"num_envs": COLUMNS, "rollout_length": ROWS, "batch_size": SAMPLES}
        return context(self.spec, needs=self.needs, make_env=WithGoals, **sizes)

    def stream(self) -> Stream:
        return Stream(CAPACITY * 2, self.stack, whole=self.data == "episodes", goals=self.goals)

    def make(self, ctx: RunContext | None = None) -> Buffer:
        return self.chosen.build(ctx or self.context())

    def segment(self, stream: Stream, start: int) -> Batch:
        return stream.segment(start, self.carries)

    def __str__(self) -> str:
        return f"({self.node}, {f'stacks of {self.stack} frames' if self.stack else 'vectors'}, {self.needs})"


class WithGoals:
    """Computes rewards and terminations of a stream's goals: both occur if the goals are equal."""

    def __init__(self, ctx: Any) -> None:
        self.traits = EnvTraits(goals=lambda: self)

    def reward(self, achieved: Any, desired: Any) -> Any:
        return -(achieved != desired).any(1).astype(np.float32)

    def terminated(self, achieved: Any, desired: Any) -> Any:
        return (achieved == desired).all(1)

    def close(self) -> None: ...


def variants(name: str, windows: tuple[int, ...], **changes: Any) -> Iterator[Variant]:
    """Yield a buffer's variants for vectors and stacked images, with all its storage options (lz4 if installed).

    A buffer that refuses vectors is tested with goals, and without images if it refuses these.
    """
    for data in sorted(load("buffer", name).gives):
        for window in windows if data == "windows" else windows[:1]:
            yield Variant(name, window, data=data, **changes)
        if data == "episodes":
            yield Variant(name, 1, data=data, off_policy=True, **changes)
    options = node_of("buffer", option_of("buffer", name)).keys()
    for deduplicate in (True, False) if "deduplicate" in options else (None,):
        for compress in (None, "lz4") if "compress" in options and find_spec("lz4") else (None,):
            ways: dict[str, Any] = {"deduplicate": deduplicate, "compress": compress}
            ways = {key: way for key, way in ways.items() if key in options}
            stacks = Variant(name, windows[-1], 3, **ways | changes)
            if stacks.serves(stacks.spec):
                yield stacks

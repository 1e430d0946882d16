"""Buffers keep streams: transition t is rows t and t + 1 of one column, whatever was overwritten."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from gymnasium import spaces

from rlplug import tree
from rlplug.api import Buffer, Data, Needs, Segment
from rlplug.checkpointing.format import FileRowLog, Snapshot, folder_of, write
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.config import Chosen, choose
from rlplug.context import RunContext
from rlplug.registry import load
from rlplug.testing.checks.memory import arrays_of
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, require, some
from rlplug.testing.context import context, spec
from rlplug.types import Batch, ConfigError, EnvSpec

COLUMNS, ROWS, SAMPLES, CAPACITY = 5, 4, 16, 120
CAPACITIES: dict[Data, int] = {"segments": 20, "episodes": CAPACITY * COLUMNS}


class Stream:
    """Numbered rows: row ``i`` of column ``b`` says ``i * COLUMNS + b``; episodes of uneven length, and gaps.

    Column 0 is one long episode, the last column has stretches of rows that are not valid.

    Args:
        stack: observations are images of so many frames, oldest first, of which there are too few in an episode's
            first rows: some columns fill up with zeros, some with the first frame. 0: vectors.
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
        """Rows ``start`` to ``start + ROWS``, in the same memory every time, as a source gives them."""
        fresh = tree.map(lambda leaf: leaf[start : start + ROWS + 1].clone(), self.rows)
        fresh["valid"][-1] = False
        self.memory = self.memory or fresh
        for into, leaf in zip(tree.leaves(self.memory), tree.leaves(fresh), strict=True):
            into.copy_(leaf)
        return {key: leaf for key, leaf in self.memory.items() if carry or key != "carry"}


def _stacked(number: Any, first: Any, stack: int) -> Any:
    """``[length, COLUMNS, stack, 16, 16]``: frames that say their number, and compress."""
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
    """A buffer for ``COLUMNS`` environments; small, where it has a capacity.

    Args:
        data: what it gives; None: the first of that.
        off_policy: of the algorithm.
        stack: see ``Stream``.
        changes: of the buffer's own options.
    """

    def __init__(
        self, name: str, window: int, stack: int = 0, data: Data | None = None, off_policy: bool = False, **changes: Any
    ) -> None:
        self.cls, self.stack = load("buffer", name), stack
        gives: Any = getattr(self.cls, "gives", None)
        require(
            isinstance(gives, frozenset) and gives and gives <= set(get_args(Data)),
            f"the class says gives = frozenset of some of {', '.join(get_args(Data))}",
        )
        require(
            isinstance(getattr(self.cls, "sequences", None), bool),
            "the class says sequences = True (windows begin at rows whose recurrent state is kept) or False",
        )
        self.data: Data = data or min(gives)
        self.drawn = off_policy or self.data == "windows"
        """samples are drawn, again and again; otherwise all is given once"""
        self.node = node_of("buffer", option_of("buffer", name))
        self.node |= ({"capacity": CAPACITIES.get(self.data, CAPACITY)} if "capacity" in self.node else {}) | changes
        self.goals = not stack and not self.serves(spec(3, 2))
        self.carries = self.cls.sequences or self.data != "windows"
        keys = ("obs", "action", "carry") if self.carries else ("obs", "action")
        window = window if self.data in ("windows", "rollout") else 1
        self.needs = Needs(window=window, data=self.data, off_policy=self.drawn, keys=keys)
        if self.cls.sequences:
            self.needs = replace(self.needs, burn_in=2, carry_stride=3)

    @property
    def chosen(self) -> Chosen:
        return choose("buffer", "buffer", self.node)

    def serves(self, of: EnvSpec) -> bool:
        """Does it accept such spaces?"""
        try:
            if hasattr(self.cls, "needs"):
                self.chosen.needs(of)
        except ConfigError:
            return False
        return True

    @property
    def spec(self) -> EnvSpec:
        if self.stack:
            return replace(spec(spaces.Box(0, 255, (self.stack, 16, 16), np.uint8), 2), frame_stack=self.stack)
        vector = spec(3, 2).single_agent.obs
        parts: dict[str, Any] = dict.fromkeys(("observation", "achieved_goal", "desired_goal"), vector)
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
    """What an environment computes of a stream's goals: they are reached, and are the end, where they are equal."""

    def __init__(self, ctx: Any) -> None: ...

    def goals(self) -> WithGoals:
        return self

    def reward(self, achieved: Any, desired: Any) -> Any:
        return -(achieved != desired).any(1).astype(np.float32)

    def terminated(self, achieved: Any, desired: Any) -> Any:
        return (achieved == desired).all(1)

    def close(self) -> None: ...


def variants(name: str, windows: tuple[int, ...], **changes: Any) -> Iterator[Variant]:
    """A buffer on vectors and on stacked images, with every way that it offers of keeping these (lz4 if installed).

    One that refuses vectors is tried with goals, and without images if it refuses these.
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


def check_streams(name: str, **changes: Any) -> None:
    """Through several times its capacity: what is sampled is what was added, row by row."""
    for variant in variants(name, (1, 3), **changes):
        try:
            _check_stream(name, variant)
        except AssertionError as error:
            error.add_note(str(variant))
            raise


def _check_stream(name: str, variant: Variant) -> None:
    stream, buffer = variant.stream(), variant.make()
    require(not buffer.ready(), "an empty buffer says that it is ready")
    drawn, ids, added, was_ready = set[int](), dict[int, int](), list[int](), False
    for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
        buffer.add(Segment(variant.segment(stream, start)))
        added += _numbers(tree.map(lambda leaf: leaf[start : start + ROWS], stream.rows))  # noqa: B023
        require(buffer.ready() or not was_ready, f"{name} was ready, and no longer is after a further segment")
        was_ready = buffer.ready()
        if turn % 2 or not was_ready:  # two segments between two samples
            continue
        sample = buffer.sample()
        given = _check_sample(stream, sample, variant)
        _check_index(sample, ids)
        was_ready = buffer.ready()
        if variant.drawn:
            require(was_ready, f"its samples are {variant.data}, but after one of them ready() is False")
        elif variant.data == "rollout":
            require(not was_ready, "it gives the last round, but after that ready() is True")
            require(_numbers(sample) == sorted(added), "drained, it gives every transition of the round once")
            added = []
        else:
            again = set[int]() if getattr(variant.cls, "repeats", "") else given & drawn
            require(not again, f"it gives {variant.data} once, but transitions {sorted(again)[:3]} came again")
            require(given <= set(added), "it gives transitions that were not added")
        drawn |= given
        if variant.data != "rollout":
            _keeps_its_own(buffer, sample)
    require(drawn, f"{name} was never ready within {CAPACITY * 2} rows of {COLUMNS} environments ({variant})")
    columns = {number % COLUMNS for number in drawn}
    require(columns == set(range(COLUMNS)), f"only the columns {sorted(columns)} of {COLUMNS} were ever sampled")


def _numbers(rows: Batch) -> list[int]:
    return sorted(rows["action"][rows["valid"]].tolist())


def _check_sample(stream: Stream, sample: Batch, variant: Variant) -> set[int]:
    """Numbers of the transitions in a sample that is right."""
    needs, changed = variant.needs, getattr(variant.cls, "relabels", frozenset[str]())
    valid, number, window = sample["valid"], sample["action"], needs.burn_in + needs.window
    require(valid.ndim == 2, f"a sample's leaves are [T+1, B, ...], but valid has shape {list(valid.shape)}")
    require(len(valid) > window, f"a sample has {len(valid)} rows; a window of {window} transitions needs {window + 1}")
    learned = valid[needs.burn_in : -1]
    require("index" not in sample or learned.any(0).all(), "a sample has columns that carry no loss: no valid row")
    truth = tree.map(lambda leaf: leaf.flatten(0, 1), stream.rows)
    t, b = valid[:-1].nonzero().unbind(1)
    now = number[t, b]
    one, two = flat({"obs": sample["obs"]}), flat({"obs": truth["obs"]})
    same = [(one[key][t + 1, b] == leaf[now + COLUMNS]).flatten(1) for key, leaf in two.items() if key not in changed]
    far = ~torch.cat(same, 1).all(1)
    require(
        not far.any(),
        f"behind rows {now[far][:3].tolist()} of the stream stand {number[t + 1, b][far][:3].tolist()}, not the next"
        f" ones of their columns, or not as they were (window {window}): look at wrap-around, at the row that the next"
        " segment overwrites, and at what images are made of",
    )
    require(truth["valid"][now].all(), "a row that is not valid came back as valid")
    for key in ("obs", "reward", "terminated", "truncated", "is_first"):
        require(key in sample, f"a sample lacks {key!r}")
        found = differences({key: tree.take(sample[key], (t, b))}, {key: tree.take(truth[key], now)})
        said = f"{key!r} of a sampled row is not what was added: copy a segment's memory, it is written again"
        require(not {*found} - changed, said)
    if "carry" in needs.keys:
        rows = number[:1] if variant.cls.sequences else number[: len(number)]
        names = differences(sample["carry"], tree.map(lambda leaf: leaf[rows], truth["carry"]))
        wanted = "[1, B, ...], that before its first row" if variant.cls.sequences else "[T+1, B, ...], as collected"
        require(not names, f"the recurrent state of a sample is {wanted}; wrong: {some(names)}")
    return set(now.tolist())


def _check_index(sample: Batch, ids: dict[int, int]) -> None:
    """An insertion id means one transition, for ever."""
    if "index" not in sample:
        return
    for key in ("index", "sample_prob", "weight"):
        if key in sample or key != "weight":
            require(
                sample[key].shape == sample["valid"].shape[1:], f"{key!r} has a number for every column of a sample"
            )
    require((sample["sample_prob"] > 0).all() and (sample["sample_prob"] <= 1).all(), "'sample_prob' lies in (0, 1]")
    if "weight" in sample:
        weight = sample["weight"]
        require(weight.isfinite().all() and (weight > 0).all(), "'weight', (N prob)^-beta, is positive and finite")
    for index, number in zip(sample["index"].tolist(), sample["action"][0].tolist(), strict=True):
        require(ids.setdefault(index, number) == number, f"the insertion id {index} stands for two transitions")


def _keeps_its_own(buffer: Buffer, sample: Batch) -> None:
    """What a learner writes into a sample, and priorities of ids that are long gone, do no harm."""
    for leaf in flat(sample).values():
        leaf.zero_()
    if "index" in sample:
        buffer.feedback(sample["index"], {"priority": torch.ones(len(sample["index"]))})


def check_saves(name: str, **changes: Any) -> None:
    """Saved and loaded again and again, through several times its capacity, it stays equal to one that never was."""
    for variant in variants(name, (3,), **changes):
        try:
            _check_saved(variant)
        except AssertionError as error:
            error.add_note(str(variant))
            raise


def _check_saved(variant: Variant) -> None:
    stream, ctx = variant.stream(), variant.context()
    twin, buffer = variant.make(), variant.make(ctx)  # equal seeds: they draw the same
    store, added = Counting(), 0
    with tempfile.TemporaryDirectory() as folder:
        for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
            twin.add(Segment(variant.segment(stream, start)))
            buffer.add(Segment(variant.segment(stream, start)))
            added += ROWS * (COLUMNS if variant.data == "episodes" else 1)  # whose rows are those of one column each
            if turn % 3 == 0:
                store.appended = 0
                buffer.save(store)
                require(
                    store.appended <= added,
                    f"save() appends {store.appended} rows, of which {added} are new: begin at store.end",
                )
                added = added - store.appended if variant.data == "episodes" else 0
                write(folder_of(Path(folder), turn), Snapshot({}, {}, store.chunks))
                store = Counting(store.chunks, decode(encode(copy_to_host(store.state))))
                buffer = variant.make(ctx)
                buffer.load(store)
            require(buffer.ready() == twin.ready(), "after load() it is ready when it was not, or the reverse")
            if turn % 2 and twin.ready():
                sample, again = twin.sample(), buffer.sample()
                names = differences(sample, again)
                require(not names, f"after load() it samples other {some(names)}: save() what sample() reads")
                if "index" in sample:
                    priority = 1.0 + sample["index"] % 7
                    twin.feedback(sample["index"], {"priority": priority})
                    buffer.feedback(again["index"], {"priority": priority})


class Counting(FileRowLog):
    """A store that counts the rows that are appended."""

    appended = 0

    def append(self, start: int, rows: Batch) -> None:
        super().append(start, rows)
        self.appended += len(next(tree.leaves(rows)))


def check_nbytes(name: str, **changes: Any) -> None:
    """``nbytes`` is an upper bound of what is kept, and at most a tenth above it."""
    for variant in variants(name, (1,), **changes):
        stream, buffer = variant.stream(), variant.make()
        said = buffer.nbytes(tree.map(lambda leaf: leaf[0], variant.segment(stream, 0)))
        for start in range(0, CAPACITY * 2 - ROWS - 1, ROWS):
            if variant.data != "rollout" or not buffer.ready():
                buffer.add(Segment(variant.segment(stream, start)))
        kept = sum(arrays_of(buffer).values())
        require(kept <= said, f"nbytes() says {said}, but {kept} bytes are kept: count every array {variant}")
        require(said <= 1.1 * kept + 1024, f"nbytes() says {said}, but only {kept} bytes are kept {variant}")

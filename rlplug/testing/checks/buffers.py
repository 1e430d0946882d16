"""Checks of buffers: transition t is rows t and t + 1 of one column, also after rows were overwritten."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Buffer, Segment
from rlplug.checkpointing.format import FileRowLog, Snapshot, folder_of, write
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.testing.checks.memory import addresses
from rlplug.testing.checks.resume import stored
from rlplug.testing.checks.runs import differences, flat, node_of, option_of, require, some
from rlplug.testing.checks.streams import CAPACITY, COLUMNS, ROWS, SAMPLES, Stream, Variant, variants
from rlplug.types import Batch

DRAWN = 64
"""samples that are drawn to see what is drawn more often"""


def check_streams(name: str, **changes: Any) -> None:
    """Check that sampled rows equal added rows, over several times the capacity."""
    for variant in variants(name, (1, 3), **changes):
        try:
            _check_stream(name, variant)
        except AssertionError as error:
            error.add_note(str(variant))
            raise


def _check_stream(name: str, variant: Variant) -> None:
    stream, buffer = variant.stream(), variant.make()
    require(not buffer.ready(), "an empty buffer returns True from ready()")
    drawn, ids, added, was_ready = set[int](), dict[int, int](), list[int](), False
    for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
        buffer.add(Segment(variant.segment(stream, start)))
        lent = addresses(buffer).keys() & addresses(stream.memory).keys()
        require(not lent, "add() keeps the memory of a segment, which the collector overwrites: keep a copy, .clone()")
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
            again = set[int]() if variant.cls.repeats else given & drawn
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
    """Check a sample, and return the numbers of its transitions."""
    needs, changed = variant.needs, variant.cls.relabels
    valid, number, window = sample["valid"], sample["action"], needs.window.burn_in + needs.window.length
    require(valid.ndim == 2, f"a sample's leaves are [T+1, B, ...], but valid has shape {list(valid.shape)}")
    require(len(valid) > window, f"a sample has {len(valid)} rows; a window of {window} transitions needs {window + 1}")
    learned = valid[needs.window.burn_in : -1]
    require("index" not in sample or learned.any(0).all(), "a sample has columns that carry no loss: no valid row")
    truth = tree.map(lambda leaf: leaf.flatten(0, 1), stream.rows)
    t, b = valid[:-1].nonzero().unbind(1)
    now = number[t, b]
    one, two = flat({"obs": sample["obs"]}), flat({"obs": truth["obs"]})
    same = [(one[key][t + 1, b] == leaf[now + COLUMNS]).flatten(1) for key, leaf in two.items() if key not in changed]
    far = ~torch.cat(same, 1).all(1)
    require(
        not far.any(),
        f"rows {now[far][:3].tolist()} of the stream are followed by {number[t + 1, b][far][:3].tolist()}, not by the"
        f" next rows of their columns, or by changed ones (window {window}): check wrap-around, the row that the next"
        " segment overwrites, and the parts of images",
    )
    require(truth["valid"][now].all(), "a row that is not valid came back as valid")
    for key in ("obs", "reward", "terminated", "truncated", "is_first"):
        require(key in sample, f"a sample lacks {key!r}")
        found = differences({key: tree.take(sample[key], (t, b))}, {key: tree.take(truth[key], now)})
        said = f"{key!r} of a sampled row is not what was added: copy a segment's memory, which is overwritten"
        require(not {*found} - changed, said)
    if "carry" in needs.keys:
        rows = number[:1] if variant.cls.sequences else number[: len(number)]
        names = differences(sample["carry"], tree.map(lambda leaf: leaf[rows], truth["carry"]))
        wanted = "[1, B, ...], that before its first row" if variant.cls.sequences else "[T+1, B, ...], as collected"
        require(not names, f"the recurrent state of a sample is {wanted}; wrong: {some(names)}")
    return set(now.tolist())


def _check_index(sample: Batch, ids: dict[int, int]) -> None:
    """Check that an insertion id always denotes the same transition."""
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
    """Check that writing into a sample, and priorities of dropped ids, do not change the buffer."""
    for leaf in flat(sample).values():
        leaf.zero_()
    if "index" in sample:
        buffer.feedback(sample["index"], {"priority": torch.ones(len(sample["index"]))})


def check_priorities(name: str, **changes: Any) -> None:
    """Windows with a high ``priority`` are drawn more often than those with a low one, and ``sample_prob`` says so."""
    if "alpha" in node_of("buffer", option_of("buffer", name)):
        changes |= {"alpha": 1.0}  # 0 draws uniformly
    for window in (1, 3):
        variant = Variant(name, window, off_policy=True, **changes)
        try:
            _check_priorities(variant)
        except AssertionError as error:
            error.add_note(str(variant))
            raise


def _check_priorities(variant: Variant) -> None:
    stream, buffer = variant.stream(), variant.make()
    for start in range(0, CAPACITY - ROWS, ROWS):
        buffer.add(Segment(variant.segment(stream, start)))
    known = _draws(buffer)[0].unique()
    for favored in (0, 1):  # every other window, and then those between them
        high = known[favored::2]
        for part in known.split(SAMPLES):
            buffer.feedback(part, {"priority": torch.where(torch.isin(part, high), 100.0, 1.0)})
        index, prob = _draws(buffer)
        is_high, is_known = torch.isin(index, high), torch.isin(index, known)
        share = is_high.sum() / is_known.sum()
        require(
            share > 0.8,
            f"half of the windows have 100 times the priority of the others, but are {share:.0%} of the samples:"
            " does feedback() apply the priority?",
        )
        low = is_known & ~is_high
        require(
            not low.any() or prob[is_high].min() > prob[low].max(),
            "'sample_prob' of windows with a high priority is not greater than that of windows with a low one",
        )


def _draws(buffer: Buffer) -> tuple[Tensor, Tensor]:
    """Return ``index`` and ``sample_prob`` of ``DRAWN`` samples."""
    samples = [buffer.sample() for _ in range(DRAWN)]
    return torch.cat([x["index"] for x in samples]), torch.cat([x["sample_prob"] for x in samples])


def check_saves(name: str, **changes: Any) -> None:
    """Check that repeated saving and loading, over several times the capacity, does not change the buffer."""
    for variant in variants(name, (3,), **changes):
        try:
            _check_saved(variant)
        except AssertionError as error:
            error.add_note(str(variant))
            raise


def _check_saved(variant: Variant) -> None:
    stream, ctx = variant.stream(), variant.context()
    twin, buffer = variant.make(), variant.make(ctx)  # equal seeds: equal samples
    store, added = Counting(), 0
    with tempfile.TemporaryDirectory() as folder:
        for turn, start in enumerate(range(0, CAPACITY * 2 - ROWS - 1, ROWS)):
            twin.add(Segment(variant.segment(stream, start)))
            buffer.add(Segment(variant.segment(stream, start)))
            added += ROWS * (COLUMNS if variant.data == "episodes" else 1)  # episodes have rows of one column
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
            if buffer.ready() != twin.ready():
                said = "after load() it is ready when it was not, or the reverse"
                raise AssertionError(_idle(variant, buffer) or said)
            if turn % 2 and twin.ready():
                sample, again = twin.sample(), buffer.sample()
                names = differences(sample, again)
                said = f"after load() it samples different {some(names)}: save() must cover what sample() reads"
                require(not names, (_idle(variant, buffer) if names else "") or said)
                if "index" in sample:
                    priority = 1.0 + sample["index"] % 7
                    twin.feedback(sample["index"], {"priority": priority})
                    buffer.feedback(again["index"], {"priority": priority})


def _idle(variant: Variant, loaded: Buffer) -> str:
    """Return a message if a loaded buffer saves the same as a new one."""
    logs = [FileRowLog(), FileRowLog()]
    for log, buffer in zip(logs, (loaded, variant.make()), strict=True):
        buffer.save(log)
    same = not differences(*({"state": log.state, "rows": stored(log)} for log in logs))
    return "load() does nothing: save() then equals that of a new buffer" if same else ""


class Counting(FileRowLog):
    """A log that counts appended rows."""

    appended = 0

    def append(self, start: int, rows: Batch) -> None:
        super().append(start, rows)
        self.appended += len(next(tree.leaves(rows)))


def check_nbytes(name: str, **changes: Any) -> None:
    """Check that ``nbytes`` is an upper bound of the memory, at most 10 % above it."""
    for variant in variants(name, (1,), **changes):
        stream, buffer = variant.stream(), variant.make()
        said = buffer.nbytes(tree.map(lambda leaf: leaf[0], variant.segment(stream, 0)))
        for start in range(0, CAPACITY * 2 - ROWS - 1, ROWS):
            if variant.data != "rollout" or not buffer.ready():
                buffer.add(Segment(variant.segment(stream, start)))
        kept = sum(addresses(buffer).values())
        require(kept <= said, f"nbytes() returns {said}, but {kept} bytes are kept: count every array {variant}")
        require(said <= 1.1 * kept + 1024, f"nbytes() returns {said}, but only {kept} bytes are kept {variant}")

"""Check that a run resumed from a checkpoint is bit-identical to the uninterrupted run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.checkpointing.format import Checkpoint, FileRowLog, folder_of, write
from rlplug.run.callbacks import capture, restore
from rlplug.testing.checks.kept import lost
from rlplug.testing.checks.runs import Case, differences, play, require, some
from rlplug.trainer.trainer import Trainer
from rlplug.types import Tree

ADVICE = (
    "Keep counters, coefficients and statistics in registered buffers (an exploration's in its carry too), draw with"
    " ctx.randn, ctx.rand and ctx.randint, and read neither the clock nor the process; a loop reads only"
    " run.progress"
)


def check_resumes(case: Case, *overrides: str, updates: int = 2) -> None:
    """Check that two runs are equal, one of them resumed from a checkpoint on disk by a new trainer.

    Attributes of their components are compared, too: this finds a lost counter before it has an effect.
    """
    first = case.build(*overrides)
    play(first, updates)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = write(folder_of(Path(folder), 1), capture(first))
        first.close()
        resumed, undisturbed = (stack.enter_context(closing(case.build(*overrides))) for _ in range(2))
        restore(resumed, Checkpoint(path))
        play(resumed, updates)
        play(undisturbed, resumed.progress.updates)
        names = differences(full_state(undisturbed), full_state(resumed))
        if words := lost(undisturbed, resumed):
            more = f"; after {resumed.progress.updates} updates the runs differ in {some(names)}" if names else ""
            raise AssertionError(f"a resumed run differs from the undisturbed one: {words}{more}. {ADVICE}")
        if names and (dropped := _dropped(case, overrides, Checkpoint(path))):
            raise AssertionError(
                f"a resumed run differs from the undisturbed one: {some(dropped)} of the checkpoint was not"
                " restored: do load() and load_state_dict() restore all of it?"
            )
    require(not names, f"a resumed run differs from the undisturbed one: {some(names)} differ. {ADVICE}")


def _dropped(case: Case, overrides: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Return the names of values that differ from the checkpoint right after it is restored."""
    with closing(case.build(*overrides)) as trainer:
        restore(trainer, checkpoint)
        trees = capture(trainer).trees
        return [name for key, now in trees.items() for name in differences(checkpoint.tree(key), now)]


def full_state(trainer: Trainer) -> Tree:
    """Return the content of a checkpoint of this moment, with the buffer's current rows by number."""
    trees, log = capture(trainer).trees, FileRowLog()
    trainer.buffer.save(log)
    return trees | {"rows": stored(log)}


def stored(store: FileRowLog) -> Tree:
    """Return rows by number; of rows stored several times, the last version."""
    rows: dict[tuple[int, int], Any] = {}
    for part in (store, *store.parts.values()):
        for start, chunk in part.rows():
            for i in range(len(next(tree.leaves(chunk)))):
                row = [_unpadded(leaf[i]).reshape(-1).double() for leaf in tree.leaves(chunk)]
                rows[part.number, start + i] = torch.cat(row)
    return {str(number): row for number, row in sorted(rows.items())}


def _unpadded(row: Tensor) -> Tensor:
    """Return a row without the padding of compressed images."""
    if not row.ndim:
        return row
    used = row.reshape(-1, row.shape[-1]).any(0).nonzero()
    return row[..., : int(used.max()) + 1 if len(used) else 0]

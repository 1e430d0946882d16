"""A run that is continued from a checkpoint is the undisturbed one, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.checkpointing.format import Checkpoint, FileRowLog, folder_of, write
from rlplug.run.callbacks import capture, restore
from rlplug.testing.checks.runs import Case, differences, play, require, some
from rlplug.trainer.trainer import Trainer
from rlplug.types import Tree

ADVICE = (
    "Keep counters, coefficients and statistics in registered buffers (an exploration's in its carry too), draw with"
    " ctx.randn, ctx.rand and ctx.randint, and read neither the clock nor the process; a loop decides by run.progress"
    " alone"
)


def check_resumes(case: Case, *overrides: str, updates: int = 2) -> None:
    """Two runs go the same way, one of them through a checkpoint on disk and a new trainer."""
    first = case.build(*overrides)
    play(first, updates)
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder_of(Path(folder), 1), capture(first))
        first.close()
        resumed = case.build(*overrides)
        restore(resumed, Checkpoint(path))
        play(resumed, updates)
        undisturbed = case.build(*overrides)
        play(undisturbed, resumed.progress.updates)
        names = differences(whole(undisturbed), whole(resumed))
    resumed.close()
    undisturbed.close()
    require(not names, f"a resumed run is not the undisturbed one: {some(names)} differ. {ADVICE}")


def whole(trainer: Trainer) -> Tree:
    """Everything that a checkpoint of this moment holds, the buffer's rows as they are now, by their number."""
    trees, log = capture(trainer).trees, FileRowLog()
    trainer.buffer.save(log)
    return trees | {"rows": stored(log)}


def stored(store: FileRowLog) -> Tree:
    """Rows by number; what was stored again counts as it is now."""
    rows: dict[tuple[int, int], Any] = {}
    for part in (store, *store.parts.values()):
        for start, chunk in part.rows():
            for i in range(len(next(tree.leaves(chunk)))):
                row = [_unpadded(leaf[i]).reshape(-1).double() for leaf in tree.leaves(chunk)]
                rows[part.number, start + i] = torch.cat(row)
    return {str(number): row for number, row in sorted(rows.items())}


def _unpadded(row: Tensor) -> Tensor:
    """Without the zeros with which compressed images are as long as the longest one of their chunk."""
    if not row.ndim:
        return row
    used = row.reshape(-1, row.shape[-1]).any(0).nonzero()
    return row[..., : int(used.max()) + 1 if len(used) else 0]

"""A run that is continued from a checkpoint is the undisturbed one, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from rlplug.testing.checks.runs import Case, differences, play, require, some
from rlplug.trainer import checkpoint
from rlplug.trainer.state import capture, restore
from rlplug.trainer.store import RowStore
from rlplug.trainer.trainer import Trainer
from rlplug.types import Tree, leaves

ADVICE = (
    "Keep counters, coefficients and statistics in registered buffers (an exploration's in its carry too), draw with"
    " ctx.randn, ctx.rand and ctx.randint, and read neither the clock nor the process"
)


def check_resumes(case: Case, *overrides: str, updates: int = 2) -> None:
    """Two trainers go the same way, one of them through a checkpoint on disk and a trainer made anew."""
    undisturbed, resumed = (_played(case.build(*overrides), updates) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.write(checkpoint.folder_of(Path(folder), 1), capture(resumed))
        resumed.close()
        resumed = case.build(*overrides, seed=0)
        restore(resumed, checkpoint.find(path))
        ends = []
        for trainer in (undisturbed, resumed):
            play(trainer, updates)
            ends.append(whole(trainer))
            trainer.close()
    names = differences(*ends)
    require(
        not names, f"a resumed run is not the undisturbed one: {some(names)} differ. {ADVICE[0].upper()}{ADVICE[1:]}"
    )


def _played(trainer: Trainer, updates: int) -> Trainer:
    play(trainer, updates)
    return trainer


def whole(trainer: Trainer) -> Tree:
    """Everything that a checkpoint of this moment holds, the buffer's rows by their number."""
    return capture(trainer).trees | {"rows": stored(trainer.store)}


def stored(store: RowStore) -> Tree:
    """Rows by number; what was stored again counts as it is now."""
    rows: dict[int, Any] = {}
    for start, piece in store.rows():
        for i in range(len(next(leaves(piece)))):
            rows[start + i] = torch.cat([leaf[i].reshape(-1).double() for leaf in leaves(piece)])
    return {str(number): row for number, row in sorted(rows.items())}

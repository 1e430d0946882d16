"""Compare two runs bit for bit."""

from __future__ import annotations

import csv
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from rlplug import tree
from rlplug.checkpointing.format import FOLDER, Checkpoint, FileRowLog, find
from rlplug.checkpointing.manager import BEST
from rlplug.config import migrate, parse
from rlplug.run.build import build
from rlplug.run.callbacks import restore
from rlplug.testing.checks.runs import differences, flat
from rlplug.types import Tree

TIMES = ("wall_s", "env_steps_per_s", "updates_per_s", "startup_s")
"""values of ``summary.json`` that differ between equal runs; in ``metrics.csv`` they are ``time/...``"""


def differences_of_runs(a: Path, b: Path) -> list[str]:
    """Return the names of values that differ between the final states of two run folders; ``[]`` if they are equal.

    Raises:
        CheckpointError: one of them holds no good checkpoint.
    """
    return [f"{part}: {name}" for part, (_, names) in compare_runs(a, b).items() for name in names]


def compare_runs(a: Path, b: Path) -> dict[str, tuple[int, list[str]]]:
    """Return, for every part of two runs, the number of compared values and the names of those that differ.

    The parts are the trees of the newest good checkpoint (``weights``, ``learner``, ``rank0``), the ``buffer`` restored
    from it, the name and score of the ``best`` checkpoint, and ``metrics.csv`` and ``summary.json`` without times.

    Raises:
        CheckpointError: one of them holds no good checkpoint.
    """
    one, two = _parts(a), _parts(b)
    return {part: (len(one[part]), differences(one[part], two[part])) for part in one}


def _parts(run: Path) -> dict[str, dict[str, Any]]:
    checkpoint = find(run)
    summary = json.loads((run / "summary.json").read_text())
    ranks = [f"rank{rank}" for rank in range(checkpoint.ranks)]
    return {
        **{name: flat(checkpoint.tree(name)) for name in ("weights", "learner", *ranks)},
        "buffer": flat(_buffer(checkpoint)),
        "best": _best(run / FOLDER / BEST),
        "metrics.csv": _metrics(run / "metrics.csv"),
        "summary.json": {key: value for key, value in summary.items() if key not in TIMES},
    }


def _best(link: Path) -> dict[str, Any]:
    if not link.is_symlink():
        return {}
    return {"name": link.readlink().name, "score": Checkpoint(link).manifest["score"]}


def _buffer(checkpoint: Checkpoint) -> Tree:
    """Return everything that the restored buffer saves, independent of the split of rows into files."""
    with closing(build(parse(migrate(checkpoint.manifest["config"])), Path())) as trainer:
        restore(trainer, checkpoint)
        store = FileRowLog()
        trainer.buffer.save(store)
    parts = (store, *store.parts.values())
    rows = {f"{x.number}: {start}": tree.map(torch.clone, chunk) for x in parts for start, chunk in x.rows()}
    return {"state": store.state, "rows": rows}


def _metrics(path: Path) -> dict[str, Any]:
    """Return every cell as written, and the order of the columns."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = [name for name in table.fieldnames or () if not name.startswith(("time/", "system/"))]
        cells = {f"row {i}, {name}": row[name] for i, row in enumerate(table) for name in columns}
    return {"columns": columns} | cells

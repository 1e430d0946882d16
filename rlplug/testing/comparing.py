"""Are two runs one and the same, bit for bit?"""

from __future__ import annotations

import csv
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from rlplug import tree
from rlplug.checkpointing.format import FOLDER
from rlplug.checkpointing.manager import BEST
from rlplug.checkpointing.reading import Checkpoint, find
from rlplug.checkpointing.row_log import FileRowLog
from rlplug.config import migrate, parse
from rlplug.run.build import build
from rlplug.run.state import restore
from rlplug.testing.checks.runs import differences, flat
from rlplug.types import Tree

TIMES = ("wall_s", "env_steps_per_s", "startup_s")
"""of ``summary.json``: what no two runs have in common; in ``metrics.csv`` it is ``time/...``"""


def differences_of_runs(a: Path, b: Path) -> list[str]:
    """Names of what differs between the ends of two run folders; ``[]``: nothing does.

    Raises:
        CheckpointError: one of them holds no good checkpoint.
    """
    return [f"{part}: {name}" for part, (_, names) in compare_runs(a, b).items() for name in names]


def compare_runs(a: Path, b: Path) -> dict[str, tuple[int, list[str]]]:
    """For every part of two runs the number of values that were compared, and the names of those that differ.

    The parts are the trees of the newest good checkpoint (``weights``, ``learner``, ``rank0``), the ``buffer`` as
    it is restored from there, however its rows were cut into files, the ``best`` checkpoint's name and score,
    ``metrics.csv`` and ``summary.json`` without their times.

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
    """What a buffer saves that has nothing written yet."""
    with closing(build(parse(migrate(checkpoint.manifest["config"])), Path())) as trainer:
        restore(trainer, checkpoint)
        store = FileRowLog()
        trainer.buffer.save(store)
    rows = {str(start): tree.map(torch.clone, chunk) for start, chunk in store.rows()}
    return {"state": store.state, "rows": rows}


def _metrics(path: Path) -> dict[str, Any]:
    """Every cell as it was written; the columns' order too."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = [name for name in table.fieldnames or () if not name.startswith("time/")]
        cells = {f"row {i}, {name}": row[name] for i, row in enumerate(table) for name in columns}
    return {"columns": columns} | cells

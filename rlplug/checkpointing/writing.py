"""Writing checkpoints: every rank writes its files, and the first rank completes the folder."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplug.checkpointing import atomic
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FORMAT, MANIFEST, CheckpointManifest, read_manifest, sealed
from rlplug.checkpointing.row_log import Chunk
from rlplug.checkpointing.serialize import Record, write_tree
from rlplug.types import Tree

READY = ".ready.partial"
POLL_S = 0.02
"""seconds between two checks for what another rank writes"""


@dataclass
class Snapshot:
    """What one rank will write: a copy in memory of a run's state."""

    manifest: dict[str, Any]
    trees: dict[str, Tree]
    chunks: list[Chunk] = field(default_factory=list)
    rank: int = 0
    ranks: int = 1


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a rank's files and return the checkpoint's folder once the first rank has completed it.

    Afterwards the snapshot's chunks refer to files in it and hold no rows. If there is a checkpoint at ``folder``
    already, only the score is written.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    if folder.exists():
        if snapshot.rank == 0 and snapshot.manifest["score"] is not None:
            note_score(folder, snapshot.manifest["score"])
        return folder
    first, share = snapshot.rank == 0, f"{folder.name}.rank{snapshot.rank}"
    partial = folder.with_name((folder.name if first else share) + PARTIAL)
    try:
        trees, chunks = _write_files(partial, snapshot)
        files = trees | chunks
        for rank in range(1, snapshot.ranks) if first else ():
            files |= _take_over(partial, folder.with_name(f"{folder.name}.rank{rank}{READY}"))
        atomic.write(partial / MANIFEST, sealed({"format": FORMAT, **snapshot.manifest, "files": files}))
        atomic.flush(partial)
        partial.rename(folder if first else folder.with_name(share + READY))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    atomic.flush(folder.parent)
    _wait_for(folder)
    for chunk, name in zip(snapshot.chunks, chunks, strict=True):
        chunk.path, chunk.rows = folder / name, {}
    return folder


def remove(folder: Path) -> None:
    """Delete a checkpoint; the first step, a rename, already hides it."""
    partial = folder.with_name(folder.name + PARTIAL)
    folder.rename(partial)
    atomic.delete(partial)


def note_score(folder: Path, score: float) -> None:
    """Write the score of an evaluation into a checkpoint."""
    manifest = read_manifest(folder, CheckpointManifest)
    atomic.replace(folder / MANIFEST, sealed(manifest | {"score": score}))


def _write_files(partial: Path, snapshot: Snapshot) -> tuple[dict[str, Record], dict[str, Record]]:
    """Write a rank's files into a new folder; return the records of its trees and of its chunks, by file name."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    trees = {f"{name}.pt": write_tree(partial / f"{name}.pt", tree) for name, tree in snapshot.trees.items()}
    chunks: dict[str, Record] = {}
    for chunk in snapshot.chunks:
        part = f"_part{chunk.part}" if chunk.part else ""
        name = f"rank{snapshot.rank}{part}_rows_{chunk.start}_{chunk.end}.pt"
        while name in chunks:  # these rows were stored again
            name = name.replace(".pt", "_.pt")
        if chunk.path is None:
            chunk.record = write_tree(partial / name, chunk.rows)
        else:
            atomic.link(chunk.path, partial / name)
        chunks[name] = chunk.record
    return trees, chunks


def _take_over(partial: Path, share: Path) -> dict[str, Any]:
    """Move another rank's files once it has written all of them; return their records."""
    _wait_for(share)
    files = read_manifest(share, CheckpointManifest)["files"]
    for name in files:
        (share / name).rename(partial / name)
    shutil.rmtree(share)
    return files


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_S)

"""Writing checkpoints: by the first rank, with the files that every other rank contributes."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplug.checkpointing import atomic
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FORMAT, MANIFEST, checksum
from rlplug.checkpointing.row_log import Chunk
from rlplug.checkpointing.serialize import encode
from rlplug.types import Tree

READY = ".ready.partial"
POLL_S = 0.02
"""seconds between two looks for what another rank writes"""


@dataclass
class Snapshot:
    """What one rank will write: a copy in memory of a run's state."""

    manifest: dict[str, Any]
    trees: dict[str, Tree]
    chunks: list[Chunk] = field(default_factory=list)
    rank: int = 0
    ranks: int = 1


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint together with the files of the other ranks.

    Afterwards the snapshot's chunks refer to the files in it, and hold no rows any more.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        files, chunks = _write_files(partial, snapshot)
        for rank in range(1, snapshot.ranks):
            files |= _take_over(partial, _share(folder, rank, READY))
        manifest = {"format": FORMAT, **snapshot.manifest, "files": files}
        atomic.write(partial / MANIFEST, _sealed(manifest))
        atomic.flush(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    atomic.flush(folder.parent)
    _refer_to(folder, snapshot, chunks)
    return folder


def contribute(folder: Path, snapshot: Snapshot) -> None:
    """Write the files of a rank that is not the first, and wait until the first rank has completed the checkpoint.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    if folder.exists():  # the run was at this step before, and the first rank only adds a score
        return
    partial = _share(folder, snapshot.rank, PARTIAL)
    try:
        files, chunks = _write_files(partial, snapshot)
        atomic.write(partial / MANIFEST, json.dumps(files).encode())
        atomic.flush(partial)
        partial.rename(_share(folder, snapshot.rank, READY))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    while not folder.exists():
        time.sleep(POLL_S)
    _refer_to(folder, snapshot, chunks)


def remove(folder: Path) -> None:
    """Delete a checkpoint. If this is interrupted, the checkpoint is gone all the same."""
    partial = folder.with_name(folder.name + PARTIAL)
    folder.rename(partial)
    atomic.delete(partial)


def note_score(folder: Path, score: float) -> None:
    """Write the score of an evaluation into a checkpoint.

    Raises:
        OSError: the disk refused; the checkpoint is unchanged.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes()) | {"score": score}
    del manifest["checksum"]
    atomic.replace(folder / MANIFEST, _sealed(manifest))


def _sealed(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest | {"checksum": checksum(manifest)}, indent=1) + "\n").encode()


def _share(folder: Path, rank: int, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.rank{rank}{suffix}")


def _write_files(partial: Path, snapshot: Snapshot) -> tuple[dict[str, Any], list[str]]:
    """Write a rank's files into a new folder.

    Returns:
        The files' records by name, and the names of those that hold its chunks, in their order.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {f"{name}.pt": _write(partial / f"{name}.pt", encode(tree)) for name, tree in snapshot.trees.items()}
    chunks: list[str] = []
    for chunk in snapshot.chunks:
        name = f"rank{snapshot.rank}_rows_{chunk.start}_{chunk.end}.pt"
        while name in files:  # these rows were stored again
            name = name.replace(".pt", "_.pt")
        if chunk.rows is not None:
            chunk.record = _write(partial / name, encode(chunk.rows))
        else:
            assert chunk.path is not None
            atomic.link(chunk.path, partial / name)
        assert chunk.record is not None
        files[name] = chunk.record
        chunks.append(name)
    return files, chunks


def _write(path: Path, data: bytes) -> dict[str, int | str]:
    """Write a file and return its record for the manifest."""
    atomic.write(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _take_over(partial: Path, share: Path) -> dict[str, Any]:
    """Move another rank's files once it has written all of them; return their records."""
    while not share.exists():
        time.sleep(POLL_S)
    files: dict[str, Any] = json.loads((share / MANIFEST).read_bytes())
    for name in files:
        (share / name).rename(partial / name)
    shutil.rmtree(share)
    return files


def _refer_to(folder: Path, snapshot: Snapshot, names: Sequence[str]) -> None:
    """Let a snapshot's chunks refer to their files in ``folder`` and free their memory."""
    for chunk, name in zip(snapshot.chunks, names, strict=True):
        chunk.path, chunk.rows = folder / name, None

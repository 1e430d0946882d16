"""The format of a checkpoint: a folder that is there whole or not at all, and that is read without executing anything.

    step_000012000/
        manifest.json              what it is of, and each file's size and SHA-256; a checksum of itself
        weights.pt                 the algorithm's and the exploration modules' state_dict
        learner.pt                 optimizers, counters, metrics that were not logged yet
        rank0.pt                   generators, environments, streams, the small part of the buffer
        rank0_rows_0_1000.pt       rows of the buffer; a hard link where the checkpoint before has the same
        rank1.pt ...               those of the other ranks

It is written as ``<name>.partial``, flushed to disk, and renamed. Another rank writes its files into
``<name>.rank1.partial`` and renames that to ``<name>.rank1.ready.partial``, where the first rank waits for it.
``FORMAT`` counts up when the meaning of a file changes; ``MIGRATIONS`` then says how the older one is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplug.checkpointing import format_1, format_2
from rlplug.checkpointing.row_log import Chunk
from rlplug.checkpointing.serialize import decode, encode
from rlplug.types import Batch, CheckpointError, Tree

FORMAT = 3
MIGRATIONS: dict[int, Mapping[str, Callable[[Any], Any]]] = {
    1: format_1.MIGRATIONS,
    2: format_2.MIGRATIONS,
}
"""format -> {"manifest", "config" (the run's configuration) or a tree's name ("weights", "learner", "rank", "rows"):
its content in the next format}"""

MANIFEST, FOLDER = "manifest.json", "checkpoints"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""of a file system without hard links, or a file with as many as it can have"""
PARTIAL, READY, DAMAGED = ".partial", ".ready.partial", ".damaged"
LOOK = 0.02
"""seconds between two looks for what another rank writes"""


NUMBER = (int, float)
SHAPE: Mapping[str, tuple[type, ...]] = {
    "run": (str,),
    "env_steps": (int,),
    "updates": (int,),
    "episodes": (int,),
    "score": (*NUMBER, type(None)),
    "wall_s": NUMBER,
    "rollout_length": (int,),
    "batch_size": (int,),
    **dict.fromkeys(("spent", "plugins", "spec", "config", "files"), (dict,)),
    "not_restored": (list,),
}
"""of a manifest of this format"""
FILES = r"weights\.pt|learner\.pt|rank\d+\.pt|rank\d+_rows_\d+_\d+_*\.pt"


@dataclass
class Snapshot:
    """What a rank will write, in memory of its own."""

    manifest: dict[str, Any]
    trees: dict[str, Tree]
    chunks: list[Chunk] = field(default_factory=list)
    rank: int = 0
    ranks: int = 1


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint with what the other ranks contribute, whole or not at all; afterwards the snapshot's chunks
    point into it.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        files, chunks = _fill(partial, snapshot)
        for rank in range(1, snapshot.ranks):
            files |= _take_over(partial, _share(folder, rank, READY))
        manifest = {"format": FORMAT, **snapshot.manifest, "files": files}
        _write(partial / MANIFEST, _text(manifest | {"checksum": _checksum(manifest)}))
        flush(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(folder.parent)
    _point(snapshot, folder, chunks)
    return folder


def contribute(folder: Path, snapshot: Snapshot) -> None:
    """Write another rank's share of a checkpoint; returns when the first rank has made it whole.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    partial = _share(folder, snapshot.rank, PARTIAL)
    if folder.exists():  # of this very step: it only learns a score
        return
    try:
        files, chunks = _fill(partial, snapshot)
        _write(partial / MANIFEST, json.dumps(files).encode())
        flush(partial)
        partial.rename(_share(folder, snapshot.rank, READY))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    while not folder.exists():
        time.sleep(LOOK)
    _point(snapshot, folder, chunks)


def _share(folder: Path, rank: int, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.rank{rank}{suffix}")


def _fill(partial: Path, snapshot: Snapshot) -> tuple[dict[str, Any], list[str]]:
    """Write a rank's files.

    Returns:
        Their records, and the names of those that hold its chunks.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {f"{name}.pt": _write(partial / f"{name}.pt", encode(tree)) for name, tree in snapshot.trees.items()}
    chunks = []
    for chunk in snapshot.chunks:
        name = f"rank{snapshot.rank}_rows_{chunk.start}_{chunk.end}.pt"
        while name in files:  # the same rows, stored again
            name = name.replace(".pt", "_.pt")
        files[name] = _place(partial / name, chunk)
        chunks.append(name)
    return files, chunks


def _take_over(partial: Path, share: Path) -> dict[str, Any]:
    """Move another rank's files, once they are all there."""
    while not share.exists():
        time.sleep(LOOK)
    files: dict[str, Any] = json.loads((share / MANIFEST).read_bytes())
    for name in files:
        (share / name).rename(partial / name)
    shutil.rmtree(share)
    return files


def _point(snapshot: Snapshot, folder: Path, names: Sequence[str]) -> None:
    """What a snapshot's chunks held in memory lies in ``folder`` from now on."""
    for chunk, name in zip(snapshot.chunks, names, strict=True):
        chunk.path, chunk.rows = folder / name, None


def remove(folder: Path) -> None:
    """Delete a checkpoint; interrupted, it is gone all the same."""
    partial = folder.with_name(folder.name + PARTIAL)
    folder.rename(partial)
    _delete(partial)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest first, good or not.

    Raises:
        CheckpointError: something else stands where they should be.
    """
    folder = run / FOLDER
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise CheckpointError(f"{folder} is no folder")
    return sorted((path for path in folder.glob("step_*") if not path.suffix), reverse=True)


def tidy(run: Path, good: Checkpoint | None) -> list[Path]:
    """Delete what a killed process did not finish writing or deleting, and set aside what is newer than ``good``.

    Returns:
        What was set aside, by its new name.
    """
    moved: list[Path] = []
    for partial in (run / FOLDER).glob(f"*{PARTIAL}"):
        _delete(partial)
    for path in checkpoints(run):
        if good is not None and path > good.path:
            aside = path.with_name(path.name + DAMAGED)
            _delete(aside)
            path.rename(aside)
            moved.append(aside)
    return moved


def _delete(path: Path) -> None:
    """A folder with all that is in it, a file, a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def note_score(folder: Path, score: float) -> None:
    """Write an evaluation into a checkpoint that was written before it.

    Raises:
        OSError: the disk refused; the checkpoint is as it was.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes()) | {"score": score}
    del manifest["checksum"]
    replace(folder / MANIFEST, _text(manifest | {"checksum": _checksum(manifest)}))


def folder_of(run: Path, env_steps: int) -> Path:
    return run / FOLDER / f"step_{env_steps:012}"


class Checkpoint:
    """A checkpoint whose manifest was read and is sound.

    Raises:
        CheckpointError: there is none at ``path``, or it is damaged, altered, foreign or newer than this program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = self._read_manifest()
        self._format: int = manifest["format"]
        self.manifest: dict[str, Any] = migrated("manifest", manifest, self._format)
        self._check()
        self.manifest["config"] = migrated("config", self.manifest["config"], self._format)

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / MANIFEST).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            why = "it has no manifest.json" if self.path.is_dir() else "it is a file"
            what = f"is no checkpoint of rlplug: {why}" if self.path.exists() else "does not exist"
            raise CheckpointError(f"{self.path} {what}") from None
        except OSError as error:
            raise CheckpointError(f"{self.path / MANIFEST} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._damaged(MANIFEST, "it is no JSON") from None
        if not isinstance(manifest, dict) or "format" not in manifest or "checksum" not in manifest:
            raise CheckpointError(f"{self.path} is no checkpoint of rlplug: its manifest.json is of something else")
        if type(manifest["format"]) is not int or manifest["format"] < 1:
            raise self._damaged(MANIFEST, f"there is no format {manifest['format']!r}")
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{self.path} was written by a newer rlplug ({manifest.get('rlplug')}) in format {manifest['format']};"
                f" this one reads formats up to {FORMAT}: upgrade rlplug"
            )
        checksum = manifest.pop("checksum")
        if checksum != _checksum(manifest):
            raise self._damaged(MANIFEST, "its checksum is another one")
        return manifest

    def _check(self) -> None:
        """Is everything there, and of its kind? A checksum says nothing about that: anybody can compute it."""
        manifest = self.manifest
        for key, kinds in SHAPE.items():
            if key not in manifest or type(manifest[key]) not in kinds:
                raise self._damaged(MANIFEST, f"{key} is missing, or not what it should be")
        for name, record in manifest["files"].items():
            sound = isinstance(record, dict) and type(record.get("bytes")) is int and type(record.get("sha256")) is str
            if not sound or not re.fullmatch(FILES, name):
                raise self._damaged(MANIFEST, f"{name!r} is no file of a checkpoint")
        if not all(type(seconds) in NUMBER for seconds in manifest["spent"].values()):
            raise self._damaged(MANIFEST, "spent is not what it should be")

    def verify(self) -> None:
        """Read every file.

        Raises:
            CheckpointError: one is missing, truncated or altered.
        """
        for name in self.manifest["files"]:
            self._verified(name)

    def tree(self, name: str) -> Tree:
        """The content of ``<name>.pt``.

        Raises:
            CheckpointError: the file is missing, truncated or altered.
        """
        return self._load(f"{name}.pt", name.rstrip("0123456789"))

    @property
    def ranks(self) -> int:
        """How many wrote it."""
        return sum(re.fullmatch(r"rank\d+\.pt", name) is not None for name in self.manifest["files"])

    def chunks(self, rank: int = 0) -> list[Chunk]:
        """The files of the rows of a rank's buffer, in the order in which they were stored."""
        found = []
        for name, record in self.manifest["files"].items():
            if name.startswith(f"rank{rank}_rows_"):
                start, end = name.removesuffix(".pt").rstrip("_").split("_")[-2:]
                found.append(Chunk(int(start), int(end), None, self.path / name, record))
        return found

    def rows(self, chunk: Chunk) -> Batch:
        """What a chunk holds.

        Raises:
            CheckpointError: as in ``tree``.
        """
        assert chunk.path is not None
        return self._load(chunk.path.name, "rows")

    def _load(self, name: str, kind: str) -> Tree:
        data = self._verified(name)
        try:
            return migrated(kind, decode(data), self._format)
        except CheckpointError as error:
            raise self._damaged(name, error.message) from None

    def _verified(self, name: str) -> bytes:
        """The file's content, if it is what the manifest says."""
        record = self.manifest["files"].get(name)
        if record is None:
            raise self._damaged(name, "the manifest does not know it")
        try:
            if (size := (self.path / name).stat().st_size) != record["bytes"]:
                raise self._damaged(name, f"it has {size} bytes of {record['bytes']}")
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            raise self._damaged(name, "it is missing") from None
        except OSError as error:
            raise self._damaged(name, str(error.strerror)) from None
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise self._damaged(name, "its checksum is another one")
        return data

    def _damaged(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or was altered: {name}: {why}")


def migrated(kind: str, content: Any, written: int) -> Any:
    """What was written in format ``written``, as today's."""
    for older in range(written, FORMAT):
        content = MIGRATIONS[older].get(kind, lambda x: x)(content)
    return content


def find(path: Path, files: tuple[str, ...] | None = None, tell: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """The newest good checkpoint of a run folder, or the checkpoint at ``path``.

    Args:
        files: names of the trees that will be read; None: all files are verified.
        tell: is given a line for each newer checkpoint that is not good.

    Raises:
        CheckpointError: there is none, or none that is good.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not (path / "config.yaml").exists() and not (path / FOLDER).exists():
        return _good(path, files)
    reasons: list[str] = []
    for candidate in checkpoints(path):
        try:
            found = _good(candidate, files)
            if candidate != folder_of(path, found.manifest["env_steps"]):
                raise CheckpointError(f"{candidate} was renamed: it is of step {found.manifest['env_steps']:,}")
            return found
        except CheckpointError as error:
            reasons.append(error.message)
            tell(f"{error.message}; trying the one before")
    if not reasons:
        raise CheckpointError(f"{path} holds no checkpoint yet")
    raise CheckpointError("\n".join([f"{path} holds no good checkpoint:", *reasons]))


def _good(path: Path, files: tuple[str, ...] | None) -> Checkpoint:
    checkpoint = Checkpoint(path)
    if files is None:
        checkpoint.verify()
    else:
        for name in files:
            checkpoint.tree(name)
    return checkpoint


def replace(path: Path, data: bytes) -> None:
    """Write a file beside its final name, flush it to disk, rename it.

    Raises:
        OSError: the disk refused; what was there still is.
    """
    beside = path.with_name(path.name + PARTIAL)
    _delete(beside)
    try:
        _write(beside, data)
        beside.replace(path)
    except OSError:
        _delete(beside)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> dict[str, int | str]:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _place(path: Path, chunk: Chunk) -> dict[str, int | str]:
    """Link a chunk that lies on disk already, write one that does not."""
    if chunk.rows is not None:
        chunk.record = _write(path, encode(chunk.rows))
    else:
        assert chunk.path is not None
        try:
            os.link(chunk.path, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copyfile(chunk.path, path)
            flush(path)
    assert chunk.record is not None
    return chunk.record


def _text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

"""The checkpoint format: a folder that is complete or absent, and read without executing code.

    step_000000012000/
        manifest.json              its run, each file's size and SHA-256, and a checksum of itself
        weights.pt                 the state_dict of the algorithm and of the exploration modules
        learner.pt                 optimizers, counters, metrics not logged yet
        rank0.pt                   generators, environments, open episodes, the small part of the buffer
        rank0_rows_0_1000.pt       rows of the buffer; a hard link if the previous checkpoint holds the same rows
        rank0_part1_rows_0_500.pt  if the buffer stores several shards
        rank1.pt ...               the same for other ranks

Every rank writes its files to a separate folder. Rank 0, which writes to ``<name>.partial``, waits for the others'
``<name>.rank1.partial``, moves their files, and renames its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, RootModel, ValidationError, field_validator

from rlplug import tree
from rlplug.api import RowLog
from rlplug.checkpointing import atomic
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.serialize import Entry, copy_to_host, damaged, read_tree, write_tree
from rlplug.types import Batch, CheckpointError, Tree, Unit

FORMAT = 1  # incremented when the meaning of a file changes
MANIFEST, FOLDER, DAMAGED = "manifest.json", "checkpoints", ".damaged"
MISFITS = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError)
MISFITS = (*MISFITS, MemoryError, AssertionError)
"""errors of code that loads an incompatible state"""
CHUNK = 64 * 2**20  # maximum bytes of a file of rows, and of additional memory for a write


Word = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]  # quoted in messages


class Origin(BaseModel):
    kind: Word
    name: Word
    distribution: Word
    version: Word


class Origins(RootModel[dict[Word, Origin]]):
    @field_validator("root")
    @classmethod
    def complete(cls, plugins: dict[str, Origin]) -> dict[str, Origin]:
        if missing := sorted({"algo", "env"} - plugins.keys()):
            raise ValueError(f"no {missing[0]}")
        return plugins


class Manifest(BaseModel):
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    run: Word
    plugins: Origins


class Node(BaseModel):
    name: str


class Settings(BaseModel):
    total_steps: int | float  # 1e7 is one of 10 million
    algo: Node
    env: Node
    hardware: Node
    model: Node


class FileEntry(BaseModel):
    bytes: int
    sha256: str


class CheckpointManifest(Manifest):
    env_steps: int
    updates: int
    unit: Unit
    score: float | None
    wall_s: float
    since_logged_s: float
    spent: dict[str, float]
    not_restored: list[Word]
    spec: dict[str, Any]
    rollout_length: int
    batch_size: int
    config: Settings
    files: dict[
        Annotated[str, Field(pattern=r"^(weights|learner|rank\d+((_part\d+)?_rows_\d+_\d+_*)?)\.pt$")], FileEntry
    ]
    checksum: str


def read_manifest(path: Path, kind: type[Manifest]) -> dict[str, Any]:
    """Return a folder's manifest, without its checksum, after checking values and checksum.

    Raises:
        CheckpointError: the folder is not from rlplug or from a newer version, or the manifest is damaged.
    """
    file, foreign = path / MANIFEST, f"{path} is not a run or checkpoint of rlplug: {MANIFEST}: "
    try:
        manifest: Any = json.loads(atomic.read(file))
    except OSError as error:
        raise CheckpointError(f"{foreign}{error.strerror}") from None
    except (ValueError, RecursionError):
        raise damaged(file, "it is not JSON") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{foreign}it has no format number")
    if type(number := manifest["format"]) is int and number > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer rlplug, in format {number}; this one reads format {FORMAT}: upgrade rlplug"
        )
    try:
        kind.model_validate(manifest, strict=True)
    except ValidationError as error:
        raise damaged(file, f"it has no valid {error.errors()[0]['loc'][0]}") from None
    if "checksum" in manifest and manifest.pop("checksum") != _checksum(manifest):
        raise damaged(file, "its checksum does not match")
    return manifest


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Serialize a checkpoint's manifest with its checksum."""
    return (json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1) + "\n").encode()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@dataclass
class Chunk:
    """Rows ``start`` to ``end - 1``: in memory (``rows``) until written, then in a file with its entry."""

    start: int
    end: int
    rows: Batch
    file: tuple[Path, Entry] | None = None
    part: int = 0  # part of the log


class FileRowLog(RowLog):
    """The ``api.RowLog`` of a run, with ``chunks`` and ``state`` of the checkpoint that it resumes from.

    ``check(rows)`` returns the rows of a file if they are valid.
    """

    def __init__(self, chunks: Sequence[Chunk] = (), state: Tree = None, number: int = 0, check: Any = copy) -> None:
        self.number, self.state, self.check = number, state, check
        self.own = [chunk for chunk in chunks if chunk.part == number]
        self.end = max((chunk.end for chunk in self.own), default=0)
        others = sorted({chunk.part for chunk in chunks} - {0}) if not number else ()
        self.parts = {part: FileRowLog(chunks, None, part, check) for part in others}

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks of all parts."""
        return [*self.own, *(chunk for part in self.parts.values() for chunk in part.own)]

    def part(self, number: int) -> FileRowLog:
        return self.parts.setdefault(number, FileRowLog(number=number, check=self.check))

    def append(self, start: int, rows: Batch) -> None:
        length = len(next(tree.leaves(rows)))
        size = sum(leaf[0].nbytes for leaf in tree.leaves(rows)) if length else 1
        step = max(1, CHUNK // size)
        for low in range(0, length, step):
            high = min(low + step, length)
            copied = copy_to_host(tree.take(rows, slice(low, high)))
            self.own.append(Chunk(start + low, start + high, copied, part=self.number))
        self.end = max(self.end, start + length)

    def trim(self, first: int) -> None:
        self.own = [chunk for chunk in self.own if chunk.end > first]

    def rows(self) -> Iterator[tuple[int, Batch]]:
        for chunk in self.own:
            yield chunk.start, chunk.rows if chunk.file is None else self.check(read_tree(*chunk.file))


@dataclass
class Snapshot:
    """In-memory copy of a run's state, for one rank to write."""

    manifest: dict[str, Any]
    trees: dict[str, Tree]
    chunks: list[Chunk] = field(default_factory=list)
    rank: int = 0
    ranks: int = 1


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a rank's files, and return the checkpoint's folder once rank 0 has completed it.

    Afterwards the snapshot's chunks refer to files in it and hold no rows. If ``folder`` is already a checkpoint, only
    the score is written. Raises ``OSError`` if the disk fails, and leaves no partial file.
    """
    if folder.exists():
        if snapshot.rank == 0 and snapshot.manifest["score"] is not None:
            note_score(folder, snapshot.manifest["score"])
        return folder
    shares = [folder.with_name(f"{folder.name}.rank{rank}{PARTIAL}") for rank in range(snapshot.ranks)]
    with atomic.renamed(shares[snapshot.rank] if snapshot.rank else folder) as partial:
        partial.mkdir(parents=True)
        files = {f"{name}.pt": write_tree(partial / f"{name}.pt", part) for name, part in snapshot.trees.items()}
        chunks: dict[str, Chunk] = {}
        for chunk in snapshot.chunks:
            part = f"_part{chunk.part}" if chunk.part else ""
            name = f"rank{snapshot.rank}{part}_rows_{chunk.start}_{chunk.end}.pt"
            while name in chunks:  # these rows were replaced
                name = name.replace(".pt", "_.pt")
            chunks[name] = chunk
            if chunk.file is None:
                files[name] = write_tree(partial / name, chunk.rows)
            else:
                written, files[name] = chunk.file
                atomic.link(written, partial / name)
        for share in shares[1:] if snapshot.rank == 0 else ():
            _wait_for(share)  # written by another rank
            for name, entry in read_manifest(share, CheckpointManifest)["files"].items():
                (share / name).rename(partial / name)
                files[name] = entry
            shutil.rmtree(share)
        atomic.write(partial / MANIFEST, sealed({"format": FORMAT, **snapshot.manifest, "files": files}))
        atomic.flush(partial)
    _wait_for(folder)
    for name, chunk in chunks.items():
        chunk.file, chunk.rows = (folder / name, files[name]), {}
    return folder


def _wait_for(path: Path) -> None:
    while not path.exists():  # written by another rank
        time.sleep(0.02)


def note_score(folder: Path, score: float) -> None:
    """Write the score of an evaluation into a checkpoint."""
    atomic.replace(folder / MANIFEST, sealed(Checkpoint(folder).manifest | {"score": score}))


def remove(folder: Path) -> None:
    """Delete a checkpoint, atomically by a rename first."""
    atomic.delete(folder.rename(folder.with_name(folder.name + PARTIAL)))


class Checkpoint:
    """A checkpoint with a valid manifest. Its files are verified when they are read.

    Every method raises ``CheckpointError`` if a file is missing, damaged, altered, foreign or of another format. The
    manifest is unchanged: its ``config`` may need ``rlplug.config.migrate``.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path, CheckpointManifest)

    def verify(self, trees: Sequence[str] | None = None) -> Checkpoint:
        """Read ``trees``, or all of them, and return the checkpoint."""
        for name in trees or [Path(file).stem for file in self.manifest["files"]]:
            self.tree(name)
        return self

    def tree(self, name: str) -> Tree:
        """Return the content of ``<name>.pt``, on the host."""
        file = self.path / f"{name}.pt"
        if file.name not in self.manifest["files"]:
            raise damaged(file, "the manifest does not list it")
        return read_tree(file, self.manifest["files"][file.name])

    @property
    def steps(self) -> int:
        """Return the run's progress, in the unit of its loop."""
        return steps_of(self.manifest)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that wrote it."""
        return sum(re.fullmatch(r"rank\d+\.pt", name) is not None for name in self.manifest["files"])

    def chunks(self, rank: int = 0) -> list[Chunk]:
        """Return the files of a rank's buffer rows, in order of storage."""
        pattern = re.compile(rf"rank{rank}(?:_part(\d+))?_rows_(\d+)_(\d+)_*\.pt")
        return [
            Chunk(int(match[2]), int(match[3]), {}, (self.path / name, entry), int(match[1] or 0))
            for name, entry in self.manifest["files"].items()
            if (match := pattern.fullmatch(name))
        ]


def folder_of(run: Path, steps: int) -> Path:
    """Return the folder of a run's checkpoint at a step."""
    return run / FOLDER / f"step_{steps:012}"


def steps_of(manifest: Mapping[str, Any]) -> int:
    """Return the progress of a checkpoint, in the unit of its run's loop."""
    return manifest[manifest["unit"]]


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first, good or not. Raises ``CheckpointError``."""
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():  # in this order, because a run may be creating it
        raise CheckpointError(f"{folder} is not a folder")
    return sorted((path for path in folder.glob("step_*") if not path.suffix), reverse=True)


def find(path: Path, trees: Sequence[str] | None = None, tell: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Return the newest good checkpoint of a run folder, or the checkpoint at ``path``.

    Args:
        trees: names of the trees to verify; None: all.
        tell: called with a line for each newer checkpoint that is not good.

    Raises:
        CheckpointError: there is no checkpoint, or no good one.
    """
    if not os.path.exists(path):  # os.path does not raise for long names
        raise CheckpointError(f"{path} does not exist")
    if not (path / "config.yaml").exists() and not (path / FOLDER).exists():
        return Checkpoint(path).verify(trees)
    reasons: list[str] = []
    for candidate in checkpoints(path):
        try:
            found = Checkpoint(candidate).verify(trees)
            if candidate != folder_of(path, found.steps):
                raise CheckpointError(f"{candidate} was renamed: it is of step {found.steps:,}")
            return found
        except CheckpointError as error:
            reasons.append(error.message)
            tell(f"{error.message}; trying the previous one")
    what = "no good checkpoint:" if reasons else "no checkpoint yet"
    raise CheckpointError("\n".join([f"{path} holds {what}", *reasons]))


def tidy(run: Path, good: Checkpoint | None) -> list[Path]:
    """Delete partial files of killed processes; rename checkpoints newer than ``good``, and return their new paths."""
    for partial in (run / FOLDER).glob(f"*{PARTIAL}"):
        atomic.delete(partial)
    newer = {path: path.with_name(path.name + DAMAGED) for path in checkpoints(run) if good and path > good.path}
    for path, aside in newer.items():
        atomic.delete(aside)
        path.rename(aside)
    return list(newer.values())

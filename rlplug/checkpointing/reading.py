"""Reading checkpoints: finding them in a run folder, and believing nothing that their checksums do not confirm."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplug.checkpointing import atomic
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FOLDER, MANIFEST, checksum, folder_of, require_format
from rlplug.checkpointing.row_log import Chunk
from rlplug.checkpointing.serialize import decode
from rlplug.types import Batch, CheckpointError, Tree

DAMAGED = ".damaged"
NUMBER = (int, float)
TYPES: Mapping[str, tuple[type, ...]] = {
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
"""of the values in a manifest"""
FILES = r"weights\.pt|learner\.pt|rank\d+\.pt|rank\d+_rows_\d+_\d+_*\.pt"


class Checkpoint:
    """A checkpoint whose manifest is sound. Its files are verified when they are read.

    Attributes:
        manifest: as it was written; ``config`` may need ``rlplug.config.run.migrate``.

    Raises:
        CheckpointError: there is none at ``path``, or it is damaged, altered, of something else, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = self._read_manifest()
        self._check_manifest()

    def verify(self) -> None:
        """Read every file.

        Raises:
            CheckpointError: a file is missing, truncated or altered.
        """
        for name in self.manifest["files"]:
            self._verified(name)

    def tree(self, name: str) -> Tree:
        """Return the content of ``<name>.pt``, on the host.

        Raises:
            CheckpointError: the file is missing, truncated or altered.
        """
        data = self._verified(f"{name}.pt")
        try:
            return decode(data)
        except CheckpointError as error:
            raise self._damaged(f"{name}.pt", error.message) from None

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return sum(re.fullmatch(r"rank\d+\.pt", name) is not None for name in self.manifest["files"])

    def chunks(self, rank: int = 0) -> list[Chunk]:
        """Return the files of a rank's buffer rows, in the order in which they were stored."""
        found: list[Chunk] = []
        for name, record in self.manifest["files"].items():
            if name.startswith(f"rank{rank}_rows_"):
                start, end = name.removesuffix(".pt").rstrip("_").split("_")[-2:]
                found.append(Chunk(int(start), int(end), None, self.path / name, record))
        return found

    def rows(self, chunk: Chunk) -> Batch:
        """Return the rows of a chunk, leaves ``[n, ...]``.

        Raises:
            CheckpointError: as ``tree``.
        """
        assert chunk.path is not None
        return self.tree(chunk.path.stem)

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / MANIFEST).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            why = "it has no manifest.json" if self.path.is_dir() else "it is a file"
            what = f"is not a checkpoint of rlplug: {why}" if self.path.exists() else "does not exist"
            raise CheckpointError(f"{self.path} {what}") from None
        except OSError as error:
            raise CheckpointError(f"{self.path / MANIFEST} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._damaged(MANIFEST, "it is not JSON") from None
        if not isinstance(manifest, dict) or not {"format", "checksum"} <= manifest.keys():
            raise CheckpointError(f"{self.path} is not a checkpoint of rlplug: its manifest.json is of something else")
        require_format(self.path, manifest["format"])
        if manifest.pop("checksum") != checksum(manifest):
            raise self._damaged(MANIFEST, "its checksum does not match")
        return manifest

    def _check_manifest(self) -> None:
        """Check keys and types. A checksum says nothing about them: anybody can compute one."""
        manifest = self.manifest
        for key, types in TYPES.items():
            if key not in manifest or type(manifest[key]) not in types:
                raise self._damaged(MANIFEST, f"{key} is missing, or has the wrong type")
        if not all(type(seconds) in NUMBER for seconds in manifest["spent"].values()):
            raise self._damaged(MANIFEST, "spent has a value of the wrong type")
        for name, record in manifest["files"].items():
            sound = isinstance(record, dict) and type(record.get("bytes")) is int and type(record.get("sha256")) is str
            if not sound or not re.fullmatch(FILES, name):
                raise self._damaged(MANIFEST, f"{name!r} is not a file of a checkpoint")

    def _verified(self, name: str) -> bytes:
        """Return a file's content after comparing it with the manifest."""
        record = self.manifest["files"].get(name)
        if record is None:
            raise self._damaged(name, "the manifest does not list it")
        try:
            if (size := (self.path / name).stat().st_size) != record["bytes"]:
                raise self._damaged(name, f"it has {size} bytes, not {record['bytes']}")
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            raise self._damaged(name, "it is missing") from None
        except OSError as error:
            raise self._damaged(name, str(error.strerror)) from None
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise self._damaged(name, "its checksum does not match")
        return data

    def _damaged(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or was altered: {name}: {why}")


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest first, good or not.

    Raises:
        CheckpointError: ``checkpoints`` is not a folder.
    """
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():  # in this order: a run may be making it
        raise CheckpointError(f"{folder} is not a folder")
    return sorted((path for path in folder.glob("step_*") if not path.suffix), reverse=True)


def find(path: Path, files: tuple[str, ...] | None = None, tell: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Return the newest good checkpoint of a run folder, or the checkpoint at ``path``.

    Args:
        files: names of the trees that will be read, which are verified; None: all files.
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


def tidy(run: Path, good: Checkpoint | None) -> list[Path]:
    """Delete what a killed process left half written or half deleted; rename checkpoints newer than ``good``.

    Returns:
        The new paths of the renamed checkpoints.
    """
    for partial in (run / FOLDER).glob(f"*{PARTIAL}"):
        atomic.delete(partial)
    moved: list[Path] = []
    for path in checkpoints(run):
        if good is not None and path > good.path:
            aside = path.with_name(path.name + DAMAGED)
            atomic.delete(aside)
            path.rename(aside)
            moved.append(aside)
    return moved

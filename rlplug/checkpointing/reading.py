"""Reading checkpoints: find them in a run folder, and use nothing that their checksums do not confirm."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rlplug.checkpointing import atomic
from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FOLDER, CheckpointManifest, damaged, folder_of, read_manifest
from rlplug.checkpointing.row_log import Chunk
from rlplug.checkpointing.serialize import read_tree
from rlplug.types import CheckpointError, Tree

DAMAGED = ".damaged"


class Checkpoint:
    """A checkpoint whose manifest is valid. Its files are verified when they are read.

    Attributes:
        manifest: as it was written; ``config`` may need ``rlplug.config.migrate``.

    Raises:
        CheckpointError: by every method: what it reads is missing, damaged, altered, foreign or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path, CheckpointManifest)

    def verify(self, trees: Sequence[str] | None = None) -> Checkpoint:
        """Read ``trees``, or all of them, and return the checkpoint."""
        for name in trees or [Path(file).stem for file in self.manifest["files"]]:
            self.tree(name)
        return self

    def tree(self, name: str) -> Tree:
        """Return the content of ``<name>.pt``, on the host."""
        file = f"{name}.pt"
        if file not in self.manifest["files"]:
            raise damaged(self.path / file, "the manifest does not list it")
        return read_tree(self.path / file, self.manifest["files"][file])

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return sum(re.fullmatch(r"rank\d+\.pt", name) is not None for name in self.manifest["files"])

    def chunks(self, rank: int = 0) -> list[Chunk]:
        """Return the files of a rank's buffer rows, in the order in which they were stored."""
        pattern = re.compile(rf"rank{rank}(?:_part(\d+))?_rows_(\d+)_(\d+)_*\.pt")
        return [
            Chunk(int(match[2]), int(match[3]), {}, self.path / name, record, int(match[1] or 0))
            for name, record in self.manifest["files"].items()
            if (match := pattern.fullmatch(name))
        ]


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest first, good or not.

    Raises:
        CheckpointError: ``checkpoints`` is not a folder.
    """
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():  # in this order: a run may be making it
        raise CheckpointError(f"{folder} is not a folder")
    return sorted((path for path in folder.glob("step_*") if not path.suffix), reverse=True)


def find(path: Path, trees: Sequence[str] | None = None, tell: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Return the newest good checkpoint of a run folder, or the checkpoint at ``path``.

    Args:
        trees: names of those that will be read, which are verified; None: all.
        tell: is given a line for each newer checkpoint that is not good.

    Raises:
        CheckpointError: there is none, or none that is good.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not (path / "config.yaml").exists() and not (path / FOLDER).exists():
        return Checkpoint(path).verify(trees)
    reasons: list[str] = []
    for candidate in checkpoints(path):
        try:
            found = Checkpoint(candidate).verify(trees)
            if candidate != folder_of(path, found.manifest["env_steps"]):
                raise CheckpointError(f"{candidate} was renamed: it is of step {found.manifest['env_steps']:,}")
            return found
        except CheckpointError as error:
            reasons.append(error.message)
            tell(f"{error.message}; trying the one before")
    what = "no good checkpoint:" if reasons else "no checkpoint yet"
    raise CheckpointError("\n".join([f"{path} holds {what}", *reasons]))


def tidy(run: Path, good: Checkpoint | None) -> list[Path]:
    """Delete what a killed process left half written or half deleted; rename checkpoints newer than ``good``.

    Returns:
        The new paths of the renamed checkpoints.
    """
    for partial in (run / FOLDER).glob(f"*{PARTIAL}"):
        atomic.delete(partial)
    newer = [path for path in checkpoints(run) if good is not None and path > good.path]
    for path in newer:
        atomic.delete(path.with_name(path.name + DAMAGED))
    return [path.rename(path.with_name(path.name + DAMAGED)) for path in newer]

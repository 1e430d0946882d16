"""The format of a checkpoint: a folder that is complete or absent, and that is read without executing any code.

    step_000000012000/
        manifest.json              the run it belongs to, each file's size and SHA-256, and a checksum of itself
        weights.pt                 the state_dict of the algorithm and of the exploration modules
        learner.pt                 optimizers, counters, metrics that were not logged yet
        rank0.pt                   generators, environments, open episodes, the small part of the buffer
        rank0_rows_0_1000.pt       rows of the buffer; a hard link if the previous checkpoint holds the same rows
        rank0_part1_rows_0_500.pt  where the buffer keeps several shards
        rank1.pt ...               the same of the other ranks

The first rank writes the folder as ``<name>.partial``, flushes it to disk, and renames it. Every other rank writes its
files into ``<name>.rank1.partial`` and renames that to ``<name>.rank1.ready.partial``, which the first rank waits for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from rlplug.types import CheckpointError

FORMAT = 1
"""is raised when the meaning of a file changes"""
MANIFEST, FOLDER = "manifest.json", "checkpoints"


class Origin(BaseModel):
    kind: str
    name: str
    distribution: str
    version: str


class Manifest(BaseModel):
    """What the manifests of runs and of checkpoints have in common."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    run: str
    plugins: dict[str, Origin]


class FileRecord(BaseModel):
    bytes: int
    sha256: str


class CheckpointManifest(Manifest):
    env_steps: int
    score: float | None
    wall_s: float
    since_logged_s: float
    spent: dict[str, float]
    not_restored: list[str]
    spec: dict[str, Any]
    rollout_length: int
    batch_size: int
    config: dict[str, Any]
    files: dict[
        Annotated[str, Field(pattern=r"^(weights|learner|rank\d+((_part\d+)?_rows_\d+_\d+_*)?)\.pt$")], FileRecord
    ]
    checksum: str


def read_manifest(path: Path, kind: type[Manifest]) -> dict[str, Any]:
    """Return a folder's manifest after checking its values and its checksum, which is left out.

    Raises:
        CheckpointError: rlplug did not write the folder, a newer version of it did, or the manifest is damaged.
    """
    foreign = f"{path} is not a run or checkpoint of rlplug: {MANIFEST}: "
    try:
        manifest: Any = json.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{foreign}{error.strerror}") from None
    except (ValueError, RecursionError):
        raise damaged(path / MANIFEST, "it is not JSON") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{foreign}it has no format number")
    number = manifest["format"]
    if type(number) is int and number > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer rlplug, in format {number}; this one reads format {FORMAT}: upgrade rlplug"
        )
    try:
        kind.model_validate(manifest, strict=True)
    except ValidationError as error:
        raise damaged(path / MANIFEST, f"it has no valid {error.errors()[0]['loc'][0]}") from None
    if "checksum" in manifest and manifest.pop("checksum") != _checksum(manifest):
        raise damaged(path / MANIFEST, "its checksum does not match")
    return manifest


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint's manifest, with its checksum."""
    return (json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1) + "\n").encode()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def damaged(file: Path, why: str) -> CheckpointError:
    """Return the error for a file of a checkpoint or of a run."""
    return CheckpointError(f"{file.parent} is damaged or was altered: {file.name}: {why}")


def folder_of(run: Path, env_steps: int) -> Path:
    """Return the folder of a run's checkpoint at an environment step."""
    return run / FOLDER / f"step_{env_steps:012}"

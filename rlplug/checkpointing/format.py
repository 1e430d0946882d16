"""The format of a checkpoint: a folder that is complete or absent, and that is read without executing any code.

    step_000000012000/
        manifest.json              the run it belongs to, each file's size and SHA-256, and a checksum of itself
        weights.pt                 the state_dict of the algorithm and of the exploration modules
        learner.pt                 optimizers, counters, metrics that were not logged yet
        rank0.pt                   generators, environments, open episodes, the small part of the buffer
        rank0_rows_0_1000.pt       rows of the buffer; a hard link if the previous checkpoint holds the same rows
        rank1.pt ...               the same of the other ranks

The first rank writes the folder as ``<name>.partial``, flushes it to disk, and renames it. Every other rank writes its
files into ``<name>.rank1.partial`` and renames that to ``<name>.rank1.ready.partial``, which the first rank waits for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplug.types import CheckpointError

FORMAT = 1
"""is raised when the meaning of a file changes"""
MANIFEST, FOLDER = "manifest.json", "checkpoints"


def require_format(path: Path, number: Any) -> None:
    """Check the format number in a manifest.

    Raises:
        CheckpointError: a newer version of rlplug wrote what lies at ``path``, or there is no such format.
    """
    if type(number) is int and number > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer rlplug, in format {number}; this one reads format {FORMAT}: upgrade rlplug"
        )
    if type(number) is not int or number != FORMAT:
        raise CheckpointError(f"{path} is damaged or was altered: there is no format {number!r}")


def folder_of(run: Path, env_steps: int) -> Path:
    """Return the folder of a run's checkpoint at an environment step."""
    return run / FOLDER / f"step_{env_steps:012}"


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its key ``checksum``."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

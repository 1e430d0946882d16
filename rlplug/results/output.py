"""Files that results are written to."""

from __future__ import annotations

from pathlib import Path

from rlplug.checkpointing import atomic
from rlplug.types import ConfigError


def require_file(path: Path) -> None:
    """Raise ``ConfigError`` if a path cannot be a file: its folder does not exist, or it is a folder itself."""
    try:
        if path.is_dir():
            raise ConfigError("--out", f"{path} is a folder; name a file")
        exists = path.parent.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise ConfigError("--out", f"{path} is no file: {getattr(error, 'strerror', None) or error}") from None
    if not exists:
        raise ConfigError("--out", f"{path.parent} is no folder; make it first")


def write(path: Path, data: bytes) -> None:
    """Write or replace a file, completely or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        atomic.replace(path, data)
    except OSError as error:
        raise ConfigError("--out", f"{path} cannot be written: {error.strerror}") from None

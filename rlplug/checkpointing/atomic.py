"""File operations that are complete or did not happen, whenever the process is killed or the disk fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

PARTIAL = ".partial"
"""ends the name of what is being written or deleted"""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""errors of a file system without links, or of a file that has as many as it can have"""


def write(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk.

    Raises:
        OSError: the file exists, or the disk refused.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it to ``path``.

    Raises:
        OSError: the disk refused; the old file is unchanged.
    """
    partial = path.with_name(path.name + PARTIAL)
    delete(partial)
    try:
        write(partial, data)
        partial.replace(path)
    except OSError:
        delete(partial)
        raise
    flush(path.parent)


def link(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to ``source``, or a copy where the file system has no links.

    Raises:
        OSError: the disk refused.
    """
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, path)
        flush(path)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its content; do nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

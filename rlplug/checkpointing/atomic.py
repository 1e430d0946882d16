"""Atomic file operations, also if the process is killed or the disk fails.

They raise ``OSError`` if the disk fails, and leave an existing file unchanged.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of files being written or deleted
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""errors of file systems without links, and of files with the maximum number of links"""


def read(path: Path) -> bytes:
    """Read a file; raise an error at other types, such as a pipe without a writer, instead of blocking."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def renamed(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write and flush, then rename it to ``path``."""
    partial = path.with_name(path.name + PARTIAL)
    delete(partial)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            delete(partial)
        raise
    flush(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Write or replace a file."""
    with renamed(path) as partial:
        write(partial, data)


def link(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to ``source``, or a copy if the file system has no links."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, path)
        flush(path)


def symlink(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target``, or do nothing if the file system has no links."""
    try:
        with renamed(path) as partial:
            partial.symlink_to(target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

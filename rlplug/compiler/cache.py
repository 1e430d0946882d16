"""Cache folder of compiled functions. Its code is executed, so other users must not be able to write there."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # folder of the libraries of torch's compiler


def own_folder() -> Path:
    """Return the folder for compiled functions, creating it if needed, and set it for torch's compiler.

    It is ``$TORCHINDUCTOR_CACHE_DIR``, or if that is unset or torch's default in the shared temporary folder,
    ``$XDG_CACHE_HOME/rlplug`` or ``~/.cache/rlplug``.

    Raises:
        OSError: the folder cannot be created, or another user can write to it or replace it.
    """
    chosen = os.environ.get(VARIABLE, "")
    if not chosen or os.path.abspath(chosen).startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        base = os.environ.get("XDG_CACHE_HOME", "")
        chosen = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "rlplug")
    try:
        if chosen.startswith("~"):
            raise FileNotFoundError("this user has no home directory")
        folder = Path(os.path.abspath(chosen))
        _check(folder)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise PermissionError(f"{folder} is open to other users: chmod 700 {folder}")
    except OSError as error:
        way = f"set {VARIABLE} to your own folder; other users must not be able to write to it or its parents"
        raise OSError(f"no folder is safe for compiled functions: {error}; {way}") from None
    from torch._inductor import codecache  # here: it takes seconds to import

    os.environ[VARIABLE], headers = str(folder), folder / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")  # torch: in the default
    return folder


def _check(folder: Path) -> None:
    """Create a folder and its parents; raise ``OSError`` unless only this user and root can change them."""
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            part.mkdir(0o700, exist_ok=True)  # another process may create it at the same time
        part.stat()  # raises at a loop of links
        info = part.lstat()
        if info.st_uid not in (os.geteuid(), os.stat("/").st_uid):  # in a container, root may have another uid
            raise PermissionError(f"{part} belongs to another user")
        if stat.S_ISLNK(info.st_mode):
            _check(Path(os.path.realpath(part.parent), os.readlink(part)))
        elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{part} can be written by other users")

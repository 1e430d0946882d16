"""Files of a path, a folder or a pattern, with a bounded search."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from rlplug.data.source import shown
from rlplug.types import ConfigError

MOST = 100_000  # maximum number of visited files and folders
DEPTH = 100  # maximum depth of nested folders


def find(path: str, key: str, suffixes: Collection[str]) -> list[Path]:
    """Return the files of a path, folder or pattern, sorted by name.

    Links to folders below it are not followed.

    Args:
        key: config key of the path, for errors.
        suffixes: suffixes of the files in a folder.

    Raises:
        ConfigError: there is none, it cannot be read, or there are too many files.
    """
    whole, walk = Path(path), _Walk()
    try:
        if whole.is_dir():
            found = [file for file in walk.below(whole, ["**", "*"]) if file.suffix in suffixes]
            found = [file for file in found if not file.name.endswith("metadata.json")]
        elif os.path.lexists(whole) or not has_magic(path):
            found = [whole] if os.path.lexists(whole) else []
        else:
            first = next(i for i, part in enumerate(whole.parts) if has_magic(part))
            found = [*walk.below(Path(*whole.parts[:first]), whole.parts[first:])]
        regular = [file for file in found if file.is_file()]
    except _TooManyError:
        said = f"{path} has more than {MOST:,} files and folders below it; name the folder of the recordings"
        raise ConfigError(key, said) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(key, f"{shown(path)} cannot be read: {shown(reason)}") from None
    if regular:
        return sorted({*regular})
    if found:
        raise ConfigError(key, f"{path} is not a regular file")
    what = f"contains no file of episodes ({', '.join(suffixes)})" if whole.is_dir() else "does not exist"
    raise ConfigError(key, f"{path} {what}")


class _TooManyError(Exception):
    """Raised when there are too many files and folders."""


class _Walk:
    """Finds files by the parts of a pattern, and counts visited entries."""

    def __init__(self) -> None:
        self.count = 0

    def below(self, folder: Path, parts: Sequence[str]) -> Iterator[Path]:
        """Iterate over matches; ``**`` matches folders of any depth, and hidden names need a pattern with a dot."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            if len(folder.parts) > DEPTH:
                raise _TooManyError
            yield from self.below(folder, rest or ["*"])
            for entry in self._entries(folder):
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    yield from self.below(folder / entry.name, parts)
        elif not has_magic(part):
            found = folder / part
            if not rest and os.path.lexists(found):
                yield found
            elif rest and found.is_dir():
                yield from self.below(found, rest)
        else:
            for entry in self._entries(folder):
                hidden = entry.name.startswith(".") and not part.startswith(".")
                if hidden or not fnmatchcase(entry.name, part):
                    continue
                if not rest:
                    yield folder / entry.name
                elif entry.is_dir():
                    yield from self.below(folder / entry.name, rest)

    def _entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Iterate over a folder's entries; a missing or unreadable one is empty."""
        try:
            entries = os.scandir(folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        with entries:
            for entry in entries:
                self.count += 1
                if self.count > MOST:
                    raise _TooManyError
                yield entry

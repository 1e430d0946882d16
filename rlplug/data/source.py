"""Interface of recorded episodes: stream rows in rlplug's internal spaces, for all file formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import psutil
from gymnasium.spaces import Box

from rlplug.envs.spec_json import from_json
from rlplug.types import Batch, CheckpointError, ConfigError, EnvSpec

MOST_NOTES = 20  # maximum notes about the files of a dataset
MOST_LETTERS = 1000  # maximum characters of file content in a line
ALWAYS = 2**30  # bytes that any file may unpack to
FOLDS = 100  # maximum ratio of unpacked to packed size above that
ELEMENTS = 2**26  # maximum elements of an observation
Choice: TypeAlias = Literal["refuse", "skip"]
Unfinished: TypeAlias = Literal["refuse", "truncate", "skip"]


@dataclass(frozen=True)
class Reading:
    """Options and results of reading files.

    Attributes:
        spec: spaces of the run; None: those of the file.
        damaged: for an unreadable part of a file: raise an error, or skip and note it.
        unfinished: for an episode without an end: raise an error, truncate it at its last observation, or skip it.
        normalized_actions: bounded actions in other libraries' files are in [-1, 1], not in the action space.
        notes: lines for the user about skipped parts and ambiguous content.
        counts: number of ``notes`` and of ``damaged`` parts.
        key: config key of the files, for errors.
    """

    spec: EnvSpec | None = None
    damaged: Choice = "refuse"
    unfinished: Unfinished = "refuse"
    normalized_actions: bool = False
    notes: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    key: str = "data.path"

    @classmethod
    def by(cls, data: Any, spec: EnvSpec, key: str = "data.path") -> Reading:
        """Return the options of the settings ``data``."""
        return cls(spec, data.damaged, data.unfinished, data.normalized_actions, key=key)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Replace ``data.path`` by ``key`` in errors of the body."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self.key if error.key == "data.path" else error.key, error.message) from None

    def lost(self, where: str, why: str) -> None:
        """Note a skipped damaged part of a file.

        Raises:
            ConfigError: damaged parts are refused.
        """
        if self.damaged == "refuse":
            raise ConfigError("data.path", f"{where} cannot be read: {shown(why)}; data.damaged=skip skips it")
        self.counts["damaged"] += 1
        self.note(f"{where} is left out: {shown(why)}")

    def looks_normalized(self, action: np.ndarray) -> bool:
        """Return whether actions are in [-1, 1] although the bounds of the run's actions are wider."""
        groups = () if self.spec is None else tuple((self.spec.native_spaces or self.spec.groups).values())
        space = groups[0].action if len(groups) == 1 else None
        if self.normalized_actions or not np.size(action):
            return False
        if not isinstance(space, Box) or not space.is_bounded():
            return False
        return max(np.abs(space.low).max(), np.abs(space.high).max()) > 1 >= np.abs(action).max()

    def note(self, line: str) -> None:
        """Add a line to ``notes``; beyond the maximum, the last line counts the rest."""
        self.counts["notes"] += 1
        more = self.counts["notes"] - MOST_NOTES
        self.notes[MOST_NOTES:] = [f"and {more:,} more such lines"] if more > 0 else []
        if more <= 0:
            self.notes.append(line)


class DatasetFile(Protocol):
    """A file of episodes, read in chunks."""

    path: Path

    @property
    def spec(self) -> EnvSpec | None: ...  # spaces declared by the file; None: it declares none
    @property
    def keys(self) -> frozenset[str]: ...  # keys of its rows
    @property
    def lengths(self) -> np.ndarray: ...  # steps of every episode, ``[n]``
    @property
    def returns(self) -> np.ndarray: ...  # sum of rewards of every episode, ``[n]``
    @property
    def normalized(self) -> bool: ...  # whether its actions look normalized, but are scaled to [-1, 1] again
    @property
    def chunks(self) -> Sequence[range]: ...  # consecutive ranges of episodes read together

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        """Return the episodes of a chunk as rows, arrays ``[L + 1, ...]``, with only ``keys`` if given."""
        ...


def refused(path: Path, why: str) -> ConfigError:
    """Return the error for a file that cannot be used as a dataset."""
    return ConfigError("data.path", f"{path} {shown(why)}")


def shown(text: object) -> str:
    """Format text from a file or a library for use in one line."""
    line = printable(" ".join(str(text)[: 2 * MOST_LETTERS].split()))
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]}..."


def printable(text: str) -> str:
    """Escape terminal control characters in a text."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def why(error: BaseException) -> str:
    """Return the cause of a library's error, on one line."""
    return shown(error) or type(error).__name__


def check_size(path: Path, size: int, in_memory: bool) -> None:
    """Check the unpacked size of a file before unpacking it.

    Args:
        size: declared bytes.
        in_memory: whether all of it is loaded into memory.

    Raises:
        ValueError: it is far more than the file can plausibly hold, or more than the free memory.
    """
    if size > max(ALWAYS, FOLDS * path.stat().st_size):
        raise ValueError(f"it declares {size / 2**20:,.1f} MiB in a file of {path.stat().st_size / 2**20:,.1f} MiB")
    if in_memory and size > (free := psutil.virtual_memory().available):
        raise ValueError(f"it needs {size / 2**30:,.1f} GiB of memory, of which {free / 2**30:,.1f} GiB are free")


def spec_of(node: Any) -> EnvSpec:
    """Return the spaces declared by one of rlplug's own files.

    Raises:
        ValueError: they are invalid.
    """
    _check_shapes(node)
    try:
        return from_json(node)
    except (CheckpointError, AttributeError, RecursionError) as error:
        raise ValueError(f"its spaces cannot be read ({why(error)})") from None


def _check_shapes(node: Any, depth: int = 0) -> None:
    """Check that no space is too large for memory."""
    if depth > 32:
        raise ValueError("its spaces are nested too deeply")
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key in ("shape", "n") and isinstance(value, list):
            sizes = [size for size in value if isinstance(size, int)]
            if (
                len(sizes) != len(value)
                or min(sizes, default=0) < 0
                or np.prod([float(size) for size in sizes]) > ELEMENTS
            ):
                raise ValueError(f"it has a space of shape {value}")
        _check_shapes(value, depth + 1)


def needs_package(name: str, what: str) -> Any:
    """Import a package of the extra ``data``.

    Raises:
        ConfigError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        said = f"{what} needs {package}, which is not installed: pip install 'rlplug[data]'"
        raise ConfigError("", said) from None

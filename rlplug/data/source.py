"""What recorded episodes are, whatever file they come from: stream rows of the spaces that rlplug sees inside."""

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

MOST_NOTES = 20  # lines about the files of a recording
MOST_LETTERS = 1000  # of what a file's contents add to a line
ALWAYS = 2**30  # bytes that a file may unpack to, however small it is
FOLDS = 100  # times its size that a larger one may unpack to
ELEMENTS = 2**26  # of one observation, at most
Choice: TypeAlias = Literal["refuse", "skip"]
Unfinished: TypeAlias = Literal["refuse", "truncate", "skip"]


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        spec: the spaces of the run; None: whatever the file has, as it has it.
        damaged: what becomes of a part of a file that cannot be read: an error, or it is left out and named.
        unfinished: what becomes of an episode without an end: an error; its last observation becomes the final one of
            a truncated episode; or it is left out.
        normalized_actions: bounded actions of files that are not rlplug's own lie in [-1, 1], and not in their space.
        notes: lines for a person, about what was left out or is read in another way than it may have been meant.
        counts: how many ``notes`` there were, and how many ``damaged`` parts.
        key: the setting that names the files, for errors.
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
        """Return how the settings ``data`` say that files are read."""
        return cls(spec, data.damaged, data.unfinished, data.normalized_actions, key=key)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name ``key`` in errors of the body, which blame ``data.path``."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self.key if error.key == "data.path" else error.key, error.message) from None

    def lost(self, where: str, why: str) -> None:
        """Note a damaged part of a file that is left out.

        Raises:
            ConfigError: damaged parts are refused.
        """
        if self.damaged == "refuse":
            raise ConfigError("data.path", f"{where} cannot be read: {shown(why)}; data.damaged=skip leaves it out")
        self.counts["damaged"] += 1
        self.note(f"{where} is left out: {shown(why)}")

    def looks_normalized(self, action: np.ndarray) -> bool:
        """Return whether actions lie in [-1, 1] though the bounds of the run's actions are wider."""
        groups = () if self.spec is None else tuple((self.spec.native_spaces or self.spec.groups).values())
        space = groups[0].action if len(groups) == 1 else None
        if self.normalized_actions or not np.size(action):
            return False
        if not isinstance(space, Box) or not space.is_bounded():
            return False
        return max(np.abs(space.low).max(), np.abs(space.high).max()) > 1 >= np.abs(action).max()

    def note(self, line: str) -> None:
        """Add a line to ``notes``; of many, the last line says how many more there are."""
        self.counts["notes"] += 1
        more = self.counts["notes"] - MOST_NOTES
        self.notes[MOST_NOTES:] = [f"and {more:,} more such lines"] if more > 0 else []
        if more <= 0:
            self.notes.append(line)


class Source(Protocol):
    """One file of episodes, which are read in chunks."""

    path: Path

    @property
    def spec(self) -> EnvSpec | None: ...  # the spaces that the file itself declares; None: it declares none
    @property
    def keys(self) -> frozenset[str]: ...  # of its rows
    @property
    def lengths(self) -> np.ndarray: ...  # steps of every episode, ``[n]``
    @property
    def returns(self) -> np.ndarray: ...  # sum of the rewards of every episode, ``[n]``
    @property
    def normalized(self) -> bool: ...  # whether its actions look as if they were normalized, and are scaled again
    @property
    def chunks(self) -> Sequence[range]: ...  # the episodes that are read together; ranges that follow each other

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        """Return the episodes of a chunk as their rows, arrays ``[L + 1, ...]``; ``keys``: only these."""
        ...


def refused(path: Path, why: str) -> ConfigError:
    """Return the error for a file that is not what a run can learn from."""
    return ConfigError("data.path", f"{path} {shown(why)}")


def shown(text: object) -> str:
    """Return what a file or a library says as a part of one line."""
    line = printable(" ".join(str(text)[: 2 * MOST_LETTERS].split()))
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]}..."


def printable(text: str) -> str:
    """Return a text without the letters that a terminal obeys."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def why(error: BaseException) -> str:
    """Return the cause of an error in a library, on one line."""
    return shown(error) or type(error).__name__


def check_size(path: Path, size: int, whole: bool) -> None:
    """Check what a file unpacks to before it is unpacked.

    Args:
        size: bytes that it declares.
        whole: all of it comes into memory.

    Raises:
        ValueError: that is far more than the file can honestly hold, or more than memory is free.
    """
    if size > max(ALWAYS, FOLDS * path.stat().st_size):
        raise ValueError(f"{size / 2**20:,.1f} MiB are said to be in {path.stat().st_size / 2**20:,.1f} MiB")
    if whole and size > (free := psutil.virtual_memory().available):
        raise ValueError(f"its {size / 2**30:,.1f} GiB are held in memory, of which {free / 2**30:,.1f} GiB are free")


def spec_of(node: Any) -> EnvSpec:
    """Return the spaces that a file of rlplug's own declares.

    Raises:
        ValueError: they cannot be read.
    """
    _check_shapes(node)
    try:
        return from_json(node)
    except (CheckpointError, AttributeError, RecursionError) as error:
        raise ValueError(f"its spaces cannot be read ({why(error)})") from None


def _check_shapes(node: Any, depth: int = 0) -> None:
    """Check that no space is so large that it fills the memory."""
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

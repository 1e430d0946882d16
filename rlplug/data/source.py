"""What recorded episodes are, whatever file they come from: stream rows of the spaces that rlplug sees inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from rlplug.types import Batch, ConfigError, EnvSpec

Choice: TypeAlias = Literal["refuse", "skip"]
Unfinished: TypeAlias = Literal["refuse", "truncate", "skip"]


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        spec: the spaces of the run; None: whatever the file has, as it has it.
        damaged: what becomes of a part of a file that cannot be read: an error, or it is left out and told.
        unfinished: what becomes of an episode without an end: an error; its last observation becomes the final one of
            a truncated episode; or it is left out.
        normalized_actions: bounded actions of files that are not rlplug's own lie in [-1, 1], and not in their space.
        notes: lines for a person, about what was left out.
        key: the setting that names the files, for errors.
    """

    spec: EnvSpec | None = None
    damaged: Choice = "refuse"
    unfinished: Unfinished = "refuse"
    normalized_actions: bool = False
    notes: list[str] = field(default_factory=list[str])
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
            raise ConfigError("data.path", f"{where} cannot be read: {why}; data.damaged=skip leaves it out")
        self.notes.append(f"{where} is left out: {why}")


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
    def chunks(self) -> Sequence[range]: ...  # the episodes that are read together; ranges that follow each other

    def read(self, chunk: int, keys: Sequence[str] | None = None) -> list[Batch]:
        """Return the episodes of a chunk as their rows, arrays ``[L + 1, ...]``; ``keys``: only these."""
        ...


def refused(path: Path, why: str) -> ConfigError:
    """Return the error for a file that is not what a run can learn from."""
    return ConfigError("data.path", f"{path} {why}")


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

"""Flags with values, ``--name value`` or ``--name=value``, of verbs that read runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlplug.registry.discovery import unknown
from rlplug.results.places import at_step, run_at
from rlplug.types import CheckpointError, ConfigError

Flags: TypeAlias = Mapping[str, tuple[Callable[[str], Any], bool]]
"""for each flag, without dashes, the type of its value, and whether it may be given several times"""

KINDS = {int: "a whole number", float: "a number"}


def of_runs(verb: str, arguments: Sequence[str], flags: Flags, usage: str) -> tuple[list[str], dict[str, Any]] | None:
    """Parse the arguments of a verb that reads runs; None: only print its ``usage``.

    Raises:
        ConfigError: there are no words; see ``parsed``.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return None
    words, given = parsed(verb, arguments, flags)
    if not words:
        raise ConfigError("", f"{verb} takes run folders, or folders of runs; see rlplug {verb} --help")
    return words, given


def run_first(
    verb: str, words: Sequence[str], takes: str = "a run folder or a checkpoint first"
) -> tuple[Path, list[str]]:
    """Return the folder that a command line begins with, and the other words.

    It is that of a run, by its path or name, or of a checkpoint, which may be ``<run>@<step>``.

    Raises:
        ConfigError: the first word is a flag, a setting or missing; or as ``results.places.run_at``.
    """
    first, *rest = words or [""]
    if first and not first.startswith("-"):
        key, has_value, _ = first.partition("=")
        run, at, step = first.rpartition("@")
        try:
            if at and step.replace("_", "").isdecimal() and not os.path.exists(first):
                return at_step(run_at(run), int(step.replace("_", ""))), rest
            return run_at(first), rest
        except CheckpointError:
            if not has_value or os.sep in key or os.path.exists(first):
                raise
    raise ConfigError("", f"{verb} takes {takes}; see rlplug {verb} --help")


def parsed(verb: str, arguments: Sequence[str], flags: Flags) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into words and the values of flags, a list for a flag that may be given several times.

    Raises:
        ConfigError: a flag is unknown, lacks its value, has one of the wrong type, or is given twice.
    """
    words: list[str] = []
    given: dict[str, Any] = {}
    rest: Iterator[str] = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        name, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in flags:
            known = unknown(f"--{name.lstrip('-')}", [f"--{flag}" for flag in flags])
            raise ConfigError("", f"{verb} takes no flag {word.partition('=')[0]}; {known}")
        kind, several = flags[name]
        value = text if has_value else next(rest, None)
        if value is None:
            raise ConfigError(f"--{name}", f"is given without a value; see rlplug {verb} --help")
        try:
            value = kind(value)
        except ValueError:
            raise ConfigError(f"--{name}", f"{value!r} is not {KINDS.get(kind, 'a value')}") from None  # type: ignore[call-overload]
        if several:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise ConfigError(f"--{name}", "is given twice")
        else:
            given[name] = value
    return words, given

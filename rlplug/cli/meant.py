"""Suggestions for verbs, flags and run names of command lines written for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rlplug.registry.discovery import unknown
from rlplug.types import CheckpointError, ConfigError

VERBS = {
    "play": "evaluate runs episodes: evaluate <run folder>, with eval.record=1 in training for videos",
    "test": "evaluate runs episodes: evaluate <run folder>",
    "eval": "evaluate runs episodes: evaluate <run folder>",
    "enjoy": "evaluate runs episodes: evaluate <run folder>",
    "continue": "resume continues a run: resume <run folder>",
    "list": "plugins lists what is installed: plugins [kind [name]]; runs lists runs",
    "branch": "fork continues from a checkpoint with other settings: fork <run folder>@<step> key=value",
    "ls": "runs lists runs: runs [filters]",
    "compare": "diff compares two runs, and report any number of them: report <runs>",
    "help": "see --help",
    "version": "see --version",
    "sweep": "-m sweeps over values: -m algo=ppo,sac seed=1,2,3",
    "tune": "-m sweeps over values: -m algo.lr=1e-3,3e-4",
    "run": "training needs no verb: algo=ppo env=cartpole",
}
"""verbs of other programs, and their equivalents"""

FLAGS = {
    "dry_run": "check shows what would run, without training: check algo=ppo env=cartpole",
    "n": "check shows what would run, without training: check algo=ppo env=cartpole",
    "list": VERBS["list"],
    "l": VERBS["list"],
    "v": "--version prints the version; a run prints more lines with logger.progress.every=1",
    "verbose": "a run prints more lines with logger.progress.every=1",
    "debug": "a run prints more lines with logger.progress.every=1; --cfg job shows every setting",
    "config": "--cfg job shows every setting; settings are written key=value",
    "resume": VERBS["continue"],
    "play": VERBS["play"],
    "render": VERBS["play"],
    "help_all": "see --help",
}
"""flags of other programs, without dashes, and their equivalents"""

DEPTH = 4
"""maximum depth of folders to search for runs: runs/multirun/<date>/<job>"""
MOST = 1_000
"""maximum number of folders per depth, and of entries per folder, to visit"""


def no_verb(verb: str, verbs: Iterable[str]) -> ConfigError:
    """Return the error for a verb that is not one of ``verbs``."""
    said = VERBS.get(verb.lower()) or f"{unknown(verb, verbs)}. Settings are written key=value"
    return ConfigError("", f"unknown verb {verb!r}; {said}")


def no_flag(argument: str, others: str = "") -> ConfigError:
    """Return the error for an unknown flag, with its equivalent or the setting of that name.

    Args:
        others: hint if neither is known.
    """
    from rlplug.config.composition import compose
    from rlplug.config.errors import elsewhere, value_at
    from rlplug.config.explain import chosen_as

    flag, _, value = argument.partition("=")
    name = flag.lstrip("-").lower().replace("-", "_")
    if name in FLAGS:
        return ConfigError("", f"there is no flag {flag}: {FLAGS[name]}")
    raw = compose().raw
    settings = [name] if value_at(raw, name) is not None else elsewhere(raw, name) or chosen_as(name, raw)
    if settings and len(name) > 1:
        written = [word if "=" in word else f"{word}={value or '<value>'}" for word in settings]
        return ConfigError("", f"there is no flag {flag}: settings are written {' or '.join(written)}")
    return ConfigError(
        "", f"there is no flag {flag}; {others or 'settings are written key=value, and --help lists flags'}"
    )


def require_run(path: str) -> None:
    """Raise ``CheckpointError`` with the newest run as a suggestion, if a path is not a run.

    For a folder of runs, suggest the newest run in it; for a missing path, the newest in ``runs``.
    """
    folder, own = Path(path), ("manifest.json", "checkpoints", "config.yaml")
    try:
        folder.stat()
        exists = True
    except FileNotFoundError:
        exists = False
    except (PermissionError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # the name is too long, or has a null character
        return
    if exists and (not folder.is_dir() or any((folder / name).exists() for name in own)):
        return
    newest = max(_runs(folder if exists else Path("runs")), key=lambda found: found[0], default=None)
    if newest is not None:
        what, where = ("contains no run", "in it") if exists else ("does not exist", "here")
        raise CheckpointError(f"{path} {what}; the newest run {where} is {newest[1]}")


def _runs(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yield runs in a folder, with the time of their start or last resume; incomplete if there are too many."""
    level = [folder]
    for _ in range(DEPTH):
        below: list[Path] = []
        for place in level[:MOST]:
            with suppress(OSError), os.scandir(place) as entries:
                below += [Path(entry.path) for entry in islice(entries, MOST) if entry.is_dir(follow_symlinks=False)]
        for run in below:
            with suppress(OSError):
                if (run / "config.yaml").exists():
                    yield (run / "manifest.json").stat().st_mtime, run
        level = below

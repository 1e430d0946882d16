"""The run folders that paths and names of a command line mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlplug.registry.discovery import unknown
from rlplug.types import CheckpointError, ConfigError

RUNS, MANIFEST, CONFIG, CHECKPOINTS = Path("runs"), "manifest.json", "config.yaml", "checkpoints"
DEEPEST = 6  # folders from a given one down to a run
MOST = 20_000  # folders that are searched, runs not counted
LISTED = 8  # runs that a message names


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, possibly a damaged one; a checkpoint is none."""
    return all(os.path.isfile(folder / name) for name in (MANIFEST, CONFIG))  # False where it may not be read


def run_at(place: str) -> Path:
    """Return the folder of a run, of a checkpoint, or of a damaged one of them; see ``located``.

    Raises:
        ConfigError: ``place`` is a folder of runs or holds none, or as ``located``.
    """
    folder = located(place)
    if any((folder / name).exists() for name in (MANIFEST, CHECKPOINTS, CONFIG)):
        return folder
    if not (found := [*folders(folder)]):
        raise CheckpointError(f"{place} holds no run")
    many, which = ("a run", "it") if len(found) == 1 else (f"{len(found)} runs", "one of them")
    raise CheckpointError(f"{place} holds {many}: {_listed(found)}; name {which}")


def at_step(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at a step.

    Raises:
        ConfigError: there is none.
    """
    from rlplug.checkpointing.format import Checkpoint, checkpoints, folder_of, steps_of  # here: it imports torch

    path = folder_of(run, step)
    if not path.exists():
        existing = sorted(steps_of(Checkpoint(path).manifest) for path in checkpoints(run))
        said = f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, existing)) or 'none'}"
        raise CheckpointError(f"{said}. checkpoint.every and checkpoint.keep_last decide which a run keeps")
    return path


def located(place: str) -> Path:
    """Return the folder of a path or of a name: that of a folder in ``runs``, or of a run below it.

    The name of a run is the end of its path. Its last folder may be shortened to its beginning or its end. Folders in
    the run, such as ``checkpoints/best``, may follow.

    Raises:
        ConfigError: there is none, or several runs have the name.
    """
    path = Path(place)
    try:
        if path.is_dir():
            return path
        exists = path.exists()
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}") from None
    if exists:
        above = path.parent.name and next(folders(path.parent), None)
        meant = f"; did you mean {path.parent}?" if above else ""
        raise CheckpointError(f"{place} is a file, not a run folder{meant}")
    below = RUNS / path
    if ".." not in path.parts and os.path.isdir(below):
        return below
    cut = path.parts.index(CHECKPOINTS) if CHECKPOINTS in path.parts[1:] else None
    *above, last = path.parts[:cut] or ("",)
    every = [*folders(RUNS)] if last else []
    ways: Sequence[Callable[[str], bool]] = (last.__eq__, lambda name: name.startswith(last) or name.endswith(last))
    for fits in ways:
        named = [run for run in every if fits(run.name) and run.parts[-1 - len(above) : -1] == (*above,)]
        if len(named) > 1:
            raise ConfigError("", f"{len(named)} runs have the name {place}: {_listed(named)}; give more of one's path")
        if named and (found := named[0].joinpath(*path.parts[cut:] if cut else ())).is_dir():
            return found
    raise CheckpointError(f"{place} does not exist{_meant(last, every)}")


def folders(place: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder, sorted by name; links and hidden folders are not followed.

    Raises:
        ConfigError: there are more than ``MOST`` folders.
    """
    left, seen = [(place, 0)], 0
    while left:
        folder, depth = left.pop()
        if is_run(folder):
            yield folder
            continue
        if (seen := seen + 1) > MOST:
            raise ConfigError("", f"{place} holds more than {MOST:,} folders; name one that is nearer to the runs")
        if depth == DEEPEST:
            continue
        below: list[str] = []
        with suppress(OSError), os.scandir(folder) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        left += [(folder / name, depth + 1) for name in sorted(below, reverse=True) if not name.startswith(".")]


def _meant(name: str, runs: Sequence[Path]) -> str:
    """Suggest the run or folder whose name is the nearest to ``name``, or the newest run."""
    nearest, is_near, _ = unknown(name, {part for run in runs for part in run.parts}).partition("?")
    if is_near:
        return f"; {nearest}?"
    return f"; the newest run here is {newest}" if (newest := next(iter(_newest_first(runs)), None)) else ""


def _listed(runs: Sequence[Path]) -> str:
    """Join the newest runs to a list."""
    left = len(runs) - LISTED
    return ", ".join(map(str, _newest_first(runs)[:LISTED])) + (f" and {left} older ones" if left > 0 else "")


def _newest_first(runs: Sequence[Path]) -> list[Path]:
    """Sort runs by the time of their start or last resume."""

    def started(run: Path) -> float:
        with suppress(OSError):
            return (run / MANIFEST).stat().st_mtime
        return 0.0

    return sorted(runs, key=started, reverse=True)

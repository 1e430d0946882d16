"""Runs and sweeps below folders, by path, by name and by their settings."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlplug.checkpointing import atomic
from rlplug.config.errors import value_at
from rlplug.registry.discovery import unknown
from rlplug.results.places import CONFIG, MANIFEST, RUNS, folders, is_run, located, run_at
from rlplug.results.record import STATES, RunRecord, read
from rlplug.types import CheckpointError, ConfigError

Filter = tuple[str, tuple[str, ...]]

JOB = "job.json"
OWN = ("state", "env", "algo")
MISSING = object()


@dataclass(frozen=True)
class Sweep:
    """A folder of jobs. ``states``: how many jobs are in each state; one that never became a run is ``failed``."""

    path: Path
    states: Mapping[str, int]
    best: RunRecord | None


def split(arguments: Sequence[str]) -> tuple[list[str], list[Filter]]:
    """Split arguments into places and filters ``key=value,value``; a path may have an equals sign, as those of jobs."""
    places = [word for word in arguments if "=" not in word or os.path.exists(word) or os.sep in word.split("=")[0]]
    words = [word.partition("=") for word in arguments if word not in places]
    return places, [(key, (value, *value.split(","))) for key, _, value in words]


def find(
    places: Sequence[str], filters: Sequence[Filter], tell: Callable[[str], None], copies: bool = False
) -> list[RunRecord]:
    """Return the runs at and below places, each of them once, that match all filters.

    Args:
        places: run folders, folders of runs, or names of run folders below ``runs``; none: all of ``runs``.
        tell: called with a line for each damaged run that is left out.
        copies: accept several copies of a run, which must not count twice in statistics.

    Raises:
        ConfigError: a place does not exist, holds no run or is a damaged one; no run matches; two runs have the name;
            two folders hold copies of one run.
    """
    if not places and not RUNS.is_dir():
        raise CheckpointError("there is no folder runs here; name another one")
    runs: dict[Path, RunRecord] = {}
    for place in places or [str(RUNS)]:
        folder = located(place)
        found = [run for run in _below(folder, tell) if run.path.resolve() not in runs]
        if not found and not any(folder.resolve() in (path, *path.parents) for path in runs):
            raise CheckpointError(f"{place} holds no run")
        runs |= {run.path.resolve(): run for run in found}
    chosen = matching([*runs.values()], filters)
    identities: dict[Any, RunRecord] = {}
    for run in () if copies else chosen:
        identity = run.manifest.get("run", run.path)
        if (other := identities.setdefault(identity, run)) is not run:
            raise ConfigError("", f"{other.path} and {run.path} are copies of one run; leave one out")
    return chosen


def single(place: str) -> RunRecord:
    """Return the run of a path, or of a name below ``runs``. Raises as ``run_at``."""
    if not is_run(folder := run_at(place)):
        raise CheckpointError(f"{place} holds no run")
    return read(folder)


def matching(runs: Sequence[RunRecord], filters: Sequence[Filter]) -> list[RunRecord]:
    """Return the runs that match all filters.

    Raises:
        ConfigError: a key is no setting of any run, a state does not exist, or no run matches.
    """
    for key, values in filters:
        if key == "state" and not {*values[1:]} <= {*STATES}:
            raise ConfigError("state", f"{values[0]!r} is no state; there are: {', '.join(STATES)}")
        if key not in OWN and all(value_at(run.config, key, MISSING) is MISSING for run in runs):
            keys = [*OWN, *dict.fromkeys(name for run in runs for name in run.config)]
            raise ConfigError(key, f"no run has such a setting; {unknown(key, keys)}")
    left = [run for run in runs if all(_matches(run, key, values) for key, values in filters)]
    if runs and not left:
        said = " ".join(f"{key}={values[0]}" for key, values in filters)
        raise ConfigError("", f"none of {len(runs)} runs matches {said}")
    return left


def sweeps(place: Path, runs: Sequence[RunRecord], metric: str) -> list[Sweep]:
    """Return the sweeps at or below a folder that hold some of ``runs``.

    Args:
        metric: the run with the largest last value is the best one.
    """
    jobs: dict[Path, list[Path]] = {}
    for root, inner, files in os.walk(place):
        if JOB in files:
            jobs.setdefault(_sweep_of(Path(root)), []).append(Path(root))
        if JOB in files or (MANIFEST in files and CONFIG in files):
            inner.clear()
        inner.sort()
    known = {run.path: run for run in runs}
    found: list[Sweep] = []
    for path, members in jobs.items():
        own = [run for job in members if (run := known.get(job))]
        scored = [run for run in own if run.last(metric) is not None]
        states = Counter(known[job].state if job in known else _status(job) for job in members)
        if own:
            found.append(Sweep(path, states, max(scored, key=lambda run: run.last(metric) or 0.0, default=None)))
    return found


def _sweep_of(job: Path) -> Path:
    """Return the folder with the sweep's table, or the job's parent."""
    return next((above for above in job.parents if (above / "sweep.csv").is_file()), job.parent)


def _status(job: Path) -> str:
    try:
        return str(json.loads(atomic.read(job / JOB))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"


def _below(folder: Path, tell: Callable[[str], None]) -> Iterator[RunRecord]:
    for path in [*folders(folder)]:
        try:
            yield read(path)
        except CheckpointError as error:
            if path == folder:
                raise
            tell(f"left out: {error}")


def _matches(run: RunRecord, key: str, values: Sequence[str]) -> bool:
    """Return whether a setting of a run is one of ``values``."""
    if key == "state":
        return run.state in values
    if key == "env" and {name.lower() for name in env_names(run)} & {value.lower() for value in values}:
        return True
    found = value_at(run.config, key, MISSING)
    if isinstance(found, Mapping):
        return not {*values}.isdisjoint([str(found["name"])] if "name" in found else map(str, found))
    return any(_parsed(value) == found or value == str(found) for value in values)


def env_names(run: RunRecord) -> set[str]:
    """Return the names of a run's environment: component, id, id without namespace and version, choice."""
    bare = re.sub(r"(NoFrameskip)?-v\d+$", "", run.env.rpartition("/")[2])
    chosen = [word.partition("=")[2] for word in run.command if word.startswith("env=")]
    return {run.env, bare, str(value_at(run.config, "env.name")), *chosen}


def _parsed(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return MISSING

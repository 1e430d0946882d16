"""How two runs differ: settings, versions, machine, commit, final figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplug.results.groups import flat
from rlplug.results.record import RunRecord

NONE = ""  # in the place of a value that a run does not have

Differences = dict[str, tuple[Any, Any]]


def differences(a: RunRecord, b: RunRecord) -> dict[str, Differences]:
    """Return for each subject the keys whose values differ, with both values; ``NONE``: a run has none.

    All final figures are returned, equal ones, too.
    """
    pairs = {
        "settings": (a.config, b.config),
        "versions": (versions(a), versions(b)),
        "machine": (_of(a, "hardware"), _of(b, "hardware")),
        "commit": (_of(a, "git"), _of(b, "git")),
    }
    found = {subject: _different(*pair) for subject, pair in pairs.items()}
    ours, theirs = final(a), final(b)
    return found | {"figures": {key: (ours.get(key, NONE), theirs.get(key, NONE)) for key in {**ours, **theirs}}}


def versions(run: RunRecord) -> dict[str, str]:
    """Return the versions of libraries, and of the distributions of the run's components."""
    libraries = {str(name): str(version) for name, version in _of(run, "versions").items()}
    origins = [origin for origin in _of(run, "plugins").values() if isinstance(origin, Mapping)]
    return {str(origin.get("distribution")): str(origin.get("version")) for origin in origins} | libraries


def final(run: RunRecord) -> dict[str, Any]:
    """Return the summary of a run, or for one that has not ended its state, steps and last metrics."""
    if run.summary:
        return {**run.summary, "status": run.state}
    return {
        "status": run.state,
        run.unit: run.steps,
        **{name: float(curve[1, -1]) for name, curve in run.metrics.items()},
    }


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    ours, theirs = dict(flat(a)), dict(flat(b))
    pairs = {key: (ours.get(key, NONE), theirs.get(key, NONE)) for key in {**ours, **theirs}}
    return {key: (x, y) for key, (x, y) in pairs.items() if repr(x) != repr(y)}


def _of(run: RunRecord, key: str) -> Mapping[str, Any]:
    value = run.manifest.get(key)
    return value if isinstance(value, Mapping) else {}

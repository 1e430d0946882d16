"""Comparison of installed plugins and versions with those of the run that wrote a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from rlplug.registry import discovery
from rlplug.registry.discovery import installed
from rlplug.types import CheckpointError


def check_installed(plugins: Mapping[str, Mapping[str, str]], libraries: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each distribution whose version differs from that of a run; import no component.

    Args:
        plugins: config key -> ``kind``, ``name``, ``distribution`` and ``version`` of its component.
        libraries: the run's ``versions()``.

    Raises:
        CheckpointError: components are missing or from another distribution, with a line for each.
    """
    if missing := [line for key, origin in plugins.items() if (line := _missing(key, origin))]:
        raise CheckpointError("\n".join(missing))
    then = {**(libraries or {}), **{origin["distribution"]: origin["version"] for origin in plugins.values()}}
    here = installed()
    changed = [(name, old, here[name]) for name, old in then.items() if here.get(name, old) != old]
    return [f"{name} was {old} then, and is {now} now" for name, old, now in changed]


def _missing(key: str, origin: Mapping[str, Any]) -> str | None:
    """Return the error of a missing component with a fix; None if it is installed."""
    kind, name, distribution, version = (origin[field] for field in ("kind", "name", "distribution", "version"))
    what = f"{key}: the run used {kind} {name!r} of {distribution} {version}"
    install = f"pip install {distribution}=={version}"
    owners = discovery.owners().get((kind, discovery.split(name)[1]), ())
    others = [plugin for plugin in owners if plugin.distribution != distribution]
    uninstall = "pip uninstall " + " ".join(plugin.distribution for plugin in others)
    if len(others) < len(owners):
        clash = bool(others) and "/" not in name
        return f"{what}, which {' and '.join(map(str, others))} claims as well: {uninstall}" if clash else None
    if broken := [plugin for plugin in discovery.broken() if plugin.distribution == distribution]:
        return f"{what}, and {broken[0]} is installed but broken ({broken[0].cause}); {install}"
    if others:
        return f"{what}, but {others[0]} provides that name now: {uninstall}, and {install}"
    with suppress(metadata.PackageNotFoundError, ValueError):  # ValueError: an empty name
        return f"{what}, and {distribution} {metadata.version(distribution)} has none of that name: {install}"
    return f"{what}, which is not installed: {install}"

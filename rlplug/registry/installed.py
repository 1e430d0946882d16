"""Versions of what is installed, compared with what a run used and with what its other processes have."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rlplug.registry import discovery
from rlplug.registry.discovery import Plugin
from rlplug.types import CheckpointError, ConfigError

LIBRARIES = ("rlplug", "torch", "lightning", "gymnasium", "numpy", "hydra-core", "omegaconf")


def versions() -> dict[str, str]:
    """Return the versions of Python, rlplug and its main libraries."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}


def installed() -> dict[str, str]:
    """Return ``versions()`` and those of all plugins."""
    return versions() | {plugin.distribution: plugin.version for plugin in discovery.plugins()}


def check_same(there: Mapping[str, str], who: str) -> None:
    """Compare what is installed here with what the first rank has.

    Args:
        there: ``installed()`` of the first rank.
        who: this process, for the error message.

    Raises:
        ConfigError: rlplug, a library or a plugin has another version here, or is missing.
    """
    here = installed()
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ConfigError(
                "hardware",
                f"{who}, on {platform.node()}, has {name} {here.get(name, 'not at all')}, and the first rank has "
                f"{there.get(name, 'it not at all')}: install the same on both",
            )


def check_installed(plugins: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compare the ``plugins`` of a run's manifest with what is installed, without importing any component.

    Args:
        plugins: config key -> ``kind``, ``name``, ``distribution`` and ``version`` of the component there.

    Returns:
        A line for each distribution that has another version now.

    Raises:
        CheckpointError: components are missing or come from another distribution; a line for each.
    """
    missing = [line for key, origin in plugins.items() if (line := _missing(key, origin))]
    if missing:
        raise CheckpointError("\n".join(missing))
    used = {origin["distribution"]: origin["version"] for origin in plugins.values()}
    return [
        f"{name} was {version} then, and is {now} now"
        for name, version in used.items()
        if (now := _version(name)) != version
    ]


def _missing(key: str, origin: Mapping[str, str]) -> str | None:
    """Return what is wrong with one component and how to repair it; None if it is installed."""
    name, distribution, version = origin["name"], origin["distribution"], origin["version"]
    pip = f"pip install {distribution}=={version}"
    kind: Any = origin["kind"]
    what = f"{key}: the run used {kind} {name!r} of {distribution} {version}"
    owners = discovery.owners().get((kind, name), ())
    others = [plugin for plugin in owners if plugin.distribution != distribution]
    if len(others) < len(owners):
        if others:
            names = " and ".join(map(str, others))
            return f"{what}, which {names} claims as well: pip uninstall {_names(others)}"
        return None
    if broken := [plugin for plugin in discovery.broken() if plugin.distribution == distribution]:
        return f"{what}, and {broken[0]} is installed but broken ({broken[0].cause}); {pip}"
    if others:
        return f"{what}, but {others[0]} provides that name now: pip uninstall {_names(others)}, and {pip}"
    if (now := _version(distribution)) is not None:
        return f"{what}, and {distribution} {now} has none of that name: {pip}"
    return f"{what}, which is not installed: {pip}"


def _names(plugins: list[Plugin]) -> str:
    return " ".join(plugin.distribution for plugin in plugins)


def _version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if there is none."""
    found = [plugin.version for plugin in discovery.plugins() if plugin.distribution == distribution]
    try:
        return found[0] if found else metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return None

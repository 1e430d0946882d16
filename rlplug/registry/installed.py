"""Installed versions of rlplug, its libraries and all plugins."""

from __future__ import annotations

import platform
from importlib import metadata

from rlplug.registry import discovery

LIBRARIES = ("rlplug", "torch", "lightning", "gymnasium", "numpy", "hydra-core", "omegaconf")


def versions() -> dict[str, str]:
    """Return the versions of Python, rlplug and its main libraries."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}


def installed() -> dict[str, str]:
    """Return ``versions()`` and the versions of all plugins."""
    return versions() | {plugin.distribution: plugin.version for plugin in discovery.plugins()}

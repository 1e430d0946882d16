"""Find plugins. Imports pluggy, importlib and Hydra's plugin API; never torch."""

from rlplug.registry.component import KINDS, Component, Kind
from rlplug.registry.discovery import (
    broken,
    conf_folder,
    get,
    load,
    names,
    owner,
    owners,
    plugins,
    refresh,
    unknown,
    warn_broken,
)
from rlplug.registry.hookspecs import Events, Manifest, hookimpl

__all__ = [
    "KINDS",
    "Component",
    "Events",
    "Kind",
    "Manifest",
    "broken",
    "conf_folder",
    "get",
    "hookimpl",
    "load",
    "names",
    "owner",
    "owners",
    "plugins",
    "refresh",
    "unknown",
    "warn_broken",
]

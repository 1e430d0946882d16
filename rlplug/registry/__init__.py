"""Finding plugins. Imports pluggy, importlib and Hydra's plugin API; never torch."""

from rlplug.registry.component import KINDS, Component, Kind
from rlplug.registry.discovery import (
    Plugin,
    broken,
    conf_folder,
    get,
    load,
    names,
    owner,
    owners,
    plugins,
    refresh,
    warn_broken,
)
from rlplug.registry.hookspecs import Events, Manifest, hookimpl, hookspec
from rlplug.registry.suggest import unknown

__all__ = [
    "KINDS",
    "Component",
    "Events",
    "Kind",
    "Manifest",
    "Plugin",
    "broken",
    "conf_folder",
    "get",
    "hookimpl",
    "hookspec",
    "load",
    "names",
    "owner",
    "owners",
    "plugins",
    "refresh",
    "unknown",
    "warn_broken",
]

"""Finding plugins. Imports pluggy, importlib and Hydra's plugin API; never torch."""

from rlplug.registry.component import KINDS, Component, Kind
from rlplug.registry.hookspecs import Events, Manifest, hookimpl, hookspec

__all__ = ["KINDS", "Component", "Events", "Kind", "Manifest", "hookimpl", "hookspec"]

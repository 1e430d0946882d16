"""Find plugins. Imports pluggy and importlib; neither torch nor Hydra."""
# pyright: reportUnusedImport=false

from rlplug.registry.discovery import (
    broken,
    conf_folder,
    load,
    names,
    owner,
    owners,
    plugins,
    refresh,
    tried_with,
    until_refresh,
    warn_broken,
)
from rlplug.registry.hookspecs import KINDS, Component, Events, Kind, Manifest, hookimpl

"""Discovery of plugins, without importing torch or Hydra."""
# pyright: reportUnusedImport=false

from rlplug.packages import conf_folder
from rlplug.registry.discovery import broken, load, names, owner, owners, plugins, refresh, tried_with
from rlplug.registry.hookspecs import KINDS, Component, Events, Kind, Manifest, hookimpl
from rlplug.registry.presets import Preset, preset, presets, shadowed, warn_broken

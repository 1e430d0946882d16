"""Hydra with every plugin's YAML groups on its search path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from rlplug.registry import search_path

PRIMARY = "config"
VERSION_BASE = "1.3"


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Inside, ``hydra.compose`` works. May stand inside a running Hydra program, which it leaves as it was."""
    search_path.register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, version_base=VERSION_BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer

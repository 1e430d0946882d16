"""Hydra with every plugin's YAML groups on its search path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader

PRIMARY = "config"
VERSION_BASE = "1.3"


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Make ``hydra.compose`` work. Inside a running Hydra program, that program's state is restored afterwards."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from rlplug.registry import search_path

    search_path.register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, version_base=VERSION_BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer


def option_names(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the options of a group: the YAML files of all plugins, and of folders that the overrides add."""
    with session() as loader:
        return loader.get_group_options(group, config_name=PRIMARY, overrides=list(overrides))

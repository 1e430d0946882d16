"""Put the YAML groups of every plugin on Hydra's search path."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlplug.registry.discovery import plugins


class PluginConfigs(SearchPathPlugin):
    """Append each plugin's folder; rlplug's own is first, so no other plugin can replace its ``config.yaml``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in plugins():
            if plugin.conf:
                search_path.append(provider=plugin.distribution, path=f"file://{plugin.conf}")


def register() -> None:
    """Register ``PluginConfigs`` with Hydra, in this process only. Can be called again."""
    Plugins.instance().register(PluginConfigs)

"""Entry points -> manifests -> the table of components.

Every process discovers for itself: nothing depends on what a parent process imported.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pluggy

from rlplug.registry.component import KINDS, Component, Kind
from rlplug.registry.hookspecs import Manifest
from rlplug.registry.suggest import unknown
from rlplug.types import ConfigError

GROUP = "rlplug"


@dataclass(frozen=True)
class Plugin:
    """One entry point of the group ``rlplug``, read."""

    name: str
    distribution: str
    version: str
    components: tuple[Component, ...] = ()
    conf: Path | None = None
    """folder of its YAML groups"""
    cause: str | None = None
    """why it is skipped; None for a sound plugin"""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@cache
def plugins() -> tuple[Plugin, ...]:
    """Every installed plugin, rlplug's own first, then by distribution. Imports manifests only."""
    found = [_read(point) for point in entry_points(group=GROUP)]
    return tuple(sorted(found, key=lambda plugin: (plugin.distribution != GROUP, plugin.distribution, plugin.name)))


def refresh() -> None:
    """Look again: a plugin was installed into the running process."""
    importlib.invalidate_caches()
    for cached in (plugins, owners, warn_broken):
        cached.cache_clear()


def broken() -> list[Plugin]:
    """Installed plugins that are skipped; their ``cause`` says why."""
    return [plugin for plugin in plugins() if plugin.cause]


@cache
def warn_broken() -> None:
    """One line on stderr for each broken plugin, once a process."""
    for plugin in broken():
        print(f"rlplug: skipping the broken plugin {plugin}: {plugin.cause}", file=sys.stderr)


@cache
def owners() -> dict[tuple[Kind, str], tuple[Plugin, ...]]:
    """Who brings a component, by kind and name, in the order of ``KINDS`` and then of names.

    More than one owner is a clash, which is an error when the name is chosen.
    """
    table: dict[tuple[Kind, str], tuple[Plugin, ...]] = {}
    for plugin in plugins():
        for component in plugin.components:
            key = (component.kind, component.name)
            table[key] = (*table.get(key, ()), plugin)
    return dict(sorted(table.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])))


def names(kind: Kind) -> list[str]:
    """Names of the components of a kind."""
    return [name for of_kind, name in owners() if of_kind == kind]


def owner(kind: Kind, name: str, key: str | None = None) -> Plugin:
    """The plugin that a component comes from.

    Args:
        key: the config key to blame; by default ``<kind>.name``.

    Raises:
        ConfigError: there is no such component, or several distributions claim it.
    """
    key = key or f"{kind}.name"
    found = owners().get((kind, name))
    if not found:
        skipped = "".join(f"; skipped because it is broken: {plugin} ({plugin.cause})" for plugin in broken())
        raise ConfigError(key, f"unknown {kind} {name!r}; {unknown(name, names(kind))}{skipped}")
    first, *others = found
    if others:
        claims = " and ".join(map(str, found))
        raise ConfigError(key, f"{kind} {name!r} is claimed by {claims}; uninstall all but one of them")
    return first


def get(kind: Kind, name: str, key: str | None = None) -> Component:
    """The component of that kind and name.

    Raises:
        ConfigError: as ``owner``.
    """
    return next(c for c in owner(kind, name, key).components if (c.kind, c.name) == (kind, name))


def load(kind: Kind, name: str, key: str | None = None) -> type[Any]:
    """Import a component's class.

    Raises:
        ConfigError: as ``owner``; or the import fails, which names the distribution.
    """
    component = get(kind, name, key)
    try:
        return component.load()
    except Exception as error:
        plugin = owner(kind, name)
        message = f"{component.target} of {plugin} cannot be imported: {_cause(error)}"
        raise ConfigError(key or f"{kind}.name", message) from error


def conf_folder(package: str) -> Path:
    """The folder of YAML groups that a manifest's ``rlplug_conf`` names.

    A package called ``conf`` is that folder, with or without an ``__init__.py``. Of any other package it is
    ``conf`` inside (an installed wheel) or beside it (a checkout that keeps ``conf/`` at its top).

    Raises:
        FileNotFoundError: no such package, or no such folder.
    """
    spec = find_spec(package)
    for location in spec.submodule_search_locations or () if spec else ():
        root = Path(location)
        folders = [root] if root.name == "conf" else [root / "conf", root.parent / "conf"]
        for folder in folders:
            if folder.is_dir():
                return folder
    raise FileNotFoundError(f"rlplug_conf names {package!r}, which has no folder of YAML groups")


def _read(point: EntryPoint) -> Plugin:
    """Import one manifest. Whatever is wrong with it becomes ``cause``: it must not stop the program."""
    distribution, version = _identity(point.dist)
    try:
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(Manifest)
        manager.register(point.load(), name=point.name)
        manager.check_pending()
        components = _components(manager)
        (conf,) = manager.hook.rlplug_conf() or [None]
        if not components and conf is None:
            raise ValueError(f"{point.value} implements neither rlplug_components nor rlplug_conf")
        return Plugin(point.name, distribution, version, components, conf_folder(conf) if conf else None)
    except (Exception, SystemExit) as error:
        return Plugin(point.name, distribution, version, cause=_cause(error))


def _components(manager: pluggy.PluginManager) -> tuple[Component, ...]:
    components: list[Any] = [c for answer in manager.hook.rlplug_components() for c in answer]
    for component in components:
        if not isinstance(component, Component):
            raise TypeError(f"rlplug_components gives {component!r}, which is not a Component")
    claims = [(component.kind, component.name) for component in components]
    for kind, name in claims:
        if claims.count((kind, name)) > 1:
            raise ValueError(f"rlplug_components names {kind} {name!r} twice")
    return tuple(components)


def _identity(distribution: Distribution | None) -> tuple[str, str]:
    fields = distribution.metadata.json if distribution else {}
    return str(fields.get("name", "a distribution without a name")), str(fields.get("version", "of unknown version"))


def _cause(error: BaseException) -> str:
    """One line: ``ImportError: No module named 'x'``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

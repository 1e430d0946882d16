"""Discovery of components from entry points and manifests, in every process independently."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar, cast

import pluggy

from rlplug.packages import Package, cause, conf_folder, extra_of, guarded, load_point, packages, versions, yaml_files
from rlplug.registry.hookspecs import KINDS, Component, Kind, Manifest
from rlplug.types import ConfigError

GROUP = "rlplug"
LIMIT_S, LEAST_S = 20.0, 0.5  # time limit of all manifests; each has half of the rest, but at least LEAST_S
MOST = 10_000  # components per manifest
Function = TypeVar("Function", bound=Callable[..., Any])
_remembered: list[Any] = []


@dataclass(frozen=True)
class Plugin:
    """Declarations of one entry point of the group ``rlplug``."""

    distribution: str
    version: str
    components: Mapping[tuple[Kind, str], Component] = field(default_factory=dict[tuple[Kind, str], Component])
    conf: Path | None = None  # folder of its YAML groups
    files: tuple[Path, ...] = ()  # the YAML files in it
    cause: str | None = None  # why it is broken and skipped; None: it is not

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def until_refresh(function: Function) -> Function:
    """Cache a function of the installed plugins until ``refresh``."""
    _remembered.append(cache(function))
    return cast(Function, _remembered[-1])


@until_refresh
def plugins() -> tuple[Plugin, ...]:
    """Return every installed plugin, rlplug's own first, then by distribution. Imports manifests only."""
    found, end = list[Plugin](), time.monotonic() + LIMIT_S
    for package in packages(GROUP):
        if package.cause:
            found.append(Plugin(package.distribution, package.version, cause=package.cause))
        for point in sorted(package.points, key=lambda point: point.name):
            share = max((end - time.monotonic()) / 2, LEAST_S)
            with warnings.catch_warnings(action="ignore"):  # warnings of its code
                plugin = guarded(share, package, partial(_declared, package, point))
            whole = isinstance(plugin, Plugin)
            found.append(plugin if whole else Plugin(package.distribution, package.version, cause=plugin))
    return tuple(sorted(found, key=lambda plugin: (plugin.distribution != GROUP, plugin.distribution)))


def refresh() -> None:
    """Discover again, after a plugin was installed into the running process."""
    importlib.invalidate_caches()
    for remembered in _remembered:
        remembered.cache_clear()


def broken() -> list[Plugin]:
    """Return the installed plugins that are skipped, with a ``cause``."""
    return [plugin for plugin in plugins() if plugin.cause]


@until_refresh
def owners() -> dict[tuple[Kind, str], tuple[Plugin, ...]]:
    """Return the plugins that declare each (kind, name), in the order of ``KINDS`` and then of names.

    More than one owner is an error when the name is selected.
    """
    keys = {key for plugin in plugins() for key in plugin.components}
    ordered = sorted(keys, key=lambda key: (KINDS.index(key[0]), key[1]))
    return {key: tuple(plugin for plugin in plugins() if key in plugin.components) for key in ordered}


def names(kind: Kind) -> list[str]:
    """Return the names of the components of a kind."""
    return [name for of_kind, name in owners() if of_kind == kind]


def owner(kind: Kind, name: str, key: str | None = None) -> Plugin:
    """Return the plugin that declares a component. Errors name the config key ``key``, default ``<kind>.name``.

    Args:
        name: name of the component; ``<distribution>/<name>`` if several distributions declare it.

    Raises:
        ConfigError: no distribution declares it, or several do.
    """
    key, (distribution, name) = key or f"{kind}.name", split(name)
    every = owners().get((kind, name), ())
    found = [plugin for plugin in every if distribution in ("", plugin.distribution)]
    if len(found) == 1:
        return found[0]
    if found:
        ways = " or ".join(f"{key}={plugin.distribution}/{name}" for plugin in found)
        message = f"{kind} {name!r} is claimed by {' and '.join(map(str, found))}; choose with {ways}"
    elif every:
        message = f"{distribution} has no {kind} {name!r}; it exists in {' and '.join(map(str, every))}"
    else:
        message = f"unknown {kind} {name!r}; {unknown(name, names(kind), or_broken=True)}"
    raise ConfigError(key, message)


def split(name: str) -> tuple[str, str]:
    """Split ``<distribution>/<name>``; the distribution is empty in a bare name."""
    distribution, _, last = name.rpartition("/")
    return distribution, last


def tried_with(kind: Kind, name: str) -> tuple[str, ...]:
    """Return the overrides with which the conformance kit tests a component. Raises as ``owner``."""
    return owner(kind, name).components[kind, split(name)[1]].tried_with


def load(kind: Kind, name: str, key: str | None = None) -> type[Any]:
    """Import a component's class; ``key`` as in ``owner``.

    Raises:
        ConfigError: as ``owner``; or the import fails or finds no class, and the message names the distribution.
    """
    plugin = owner(kind, name, key)
    target = plugin.components[kind, split(name)[1]].target
    try:
        if isinstance(cls := pkgutil.resolve_name(target), type):
            return cls
        raise TypeError("it is not a class")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        said = f"{target} of {plugin} cannot be imported: {cause(error)}"
        if isinstance(error, ModuleNotFoundError) and (extra := extra_of(plugin.distribution, error.name or "")):
            said = f"needs the package {error.name}, which is not installed: pip install '{extra}'"
        raise ConfigError(key or f"{kind}.name", said) from error


def unknown(
    name: str, known: Iterable[str], parent: str = "", or_broken: bool = False, meant: str | None = None
) -> str:
    """Suggest the nearest of the ``known`` names, as a full key below ``parent``, and list all.

    >>> unknown("sca", ["sac", "ppo"])
    'did you mean sac? There are: ppo, sac'

    Args:
        or_broken: also list broken plugins, because one of them may have the name.
        meant: the right name, if known.
    """
    names = sorted(set(known))
    nearest = meant if meant in names else _nearest(name, names)
    start = f"did you mean {parent and parent + '.'}{nearest}? There" if nearest else "there"
    skipped = [f"; skipped because it is broken: {plugin} ({plugin.cause})" for plugin in broken() if or_broken]
    return "".join([f"{start} are: {', '.join(names)}" if names else "there are none", *skipped])


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that differs by a typo, or by a missing or extra word; None: there is none."""

    def likeness(other: str) -> float:
        pair = name.lower(), other.lower()
        some, others = ({*re.findall("[a-z0-9]+", text)} for text in pair)
        slip = sorted(pair[0]) == sorted(pair[1]) or (some and others and (some <= others or others <= some))
        alike = SequenceMatcher(None, *pair).ratio()
        return alike if slip or alike >= 0.75 else 0  # below that, different words look alike: n_steps, kl_stop

    nearest = max(known, key=likeness, default="")
    return nearest if nearest and likeness(nearest) else None


def _declared(package: Package, point: EntryPoint) -> Plugin:
    """Import one manifest and return its declarations."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Manifest)
    manager.register(load_point(point), name=point.name)
    manager.check_pending()
    components: dict[tuple[Kind, str], Component] = {}
    for component in itertools.islice(manager.hook.rlplug_components() or (), MOST + 1):
        if type(component) is not Component:
            raise TypeError(f"rlplug_components gives {component!r}, which is not a Component")
        component = replace(component)  # checks it again
        if (component.kind, component.name) in components:
            raise ValueError(f"rlplug_components names {component.kind} {component.name!r} twice")
        components[component.kind, component.name] = component
    if len(components) > MOST:
        raise ValueError(f"rlplug_components gives more than {MOST:,} components")
    conf = manager.hook.rlplug_conf()
    if not components and conf is None:
        raise ValueError(f"{point.value} implements neither rlplug_components nor rlplug_conf")
    folder = conf_folder(conf) if conf is not None else None
    files = yaml_files(folder) if folder else ()
    return Plugin(package.distribution, package.version, components, folder, files)


def installed() -> dict[str, str]:
    """Return the versions of Python, rlplug, its main libraries and all plugins."""
    return versions() | {plugin.distribution: plugin.version for plugin in plugins()}

"""``plugins``: what is installed, from which distribution, and the options of a component."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

from rlplug import registry
from rlplug.cli import table
from rlplug.registry import KINDS, Kind
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

USAGE = """rlplug plugins                 every component, with its distribution and version
rlplug plugins <kind>          the components of one kind
rlplug plugins <kind> <name>   the options of one: type, default, range and what they do"""


def main(arguments: Sequence[str]) -> int:
    """Print tables. Listing imports manifests only; the options of a component import that component.

    Raises:
        ConfigError: no such kind or component.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    kind, name, *more = (*arguments, "", "")[: max(2, len(arguments))]
    if any(more) or any(argument.startswith("-") or "=" in argument for argument in arguments):
        raise ConfigError("", "plugins takes at most a kind and a name; see rlplug plugins --help")
    if kind and kind not in KINDS:
        raise ConfigError("", f"unknown kind {kind!r}; {unknown(kind, KINDS)}")
    kinds: tuple[Kind, ...] = tuple(k for k in get_args(Kind) if k == kind or not kind)
    print("\n".join(_options(kinds[0], name) if name else _components(kinds)))
    return 0


def _components(kinds: Sequence[Kind]) -> list[str]:
    rows = [
        (kind, name, plugin.distribution, plugin.version)
        for (kind, name), plugins in registry.owners().items()
        for plugin in plugins
        if kind in kinds
    ]
    lines = table(("KIND", "NAME", "DISTRIBUTION", "VERSION"), rows)
    for (kind, name), plugins in registry.owners().items():
        if kind in kinds and len(plugins) > 1:
            lines.append(f"clash: {kind} {name!r} is claimed by {' and '.join(map(str, plugins))}; neither can be used")
    return lines + [f"broken: {plugin}, skipped: {plugin.cause}" for plugin in registry.broken()]


def _options(kind: Kind, name: str) -> list[str]:
    from rlplug.cli.options import options

    config = registry.load(kind, name).Config
    plugin = registry.owner(kind, name)
    rows = [(o.name, o.type, o.default, o.range, o.doc) for o in options(config, _defaults(kind, name))]
    return [
        f"{kind} {name}: {plugin.components[kind, name].target}, of {plugin}",
        *(table(("OPTION", "TYPE", "DEFAULT", "RANGE", ""), rows) if rows else ["It has no options."]),
    ]


def _defaults(kind: Kind, name: str) -> dict[str, Any]:
    """Return the component's node from the YAML file with its name, or from the first one that selects it."""
    from rlplug.config import default_node, option_names

    for option in sorted(option_names(kind), key=lambda option: (option != name, option)):
        with suppress(ConfigError):
            node = default_node(kind, option)
            if node.get("name") == name:
                return node
    return {}

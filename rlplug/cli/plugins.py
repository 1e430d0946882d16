"""``plugins``: list installed components and their distributions, or the options of a component or preset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

import yaml

from rlplug import registry
from rlplug.cli import say, table
from rlplug.config.errors import joined, show, single, value_at
from rlplug.packages import one_line
from rlplug.registry import KINDS, Kind, Preset, discovery
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

USAGE = """rlplug plugins                 every component, with its distribution and version; presets
rlplug plugins <kind>          the components of one kind, and its presets
rlplug plugins <kind> <name>   the options of one: type, default, range and what they do
rlplug plugins tuned|experiment [<name>]   settings for a pair, and named sets of settings

--json prints the same as one JSON document."""

GROUPS = ("tuned", "experiment")
"""groups of files that do not select a component"""
MISSING = "???"
COLUMNS = ("KIND", "NAME", "DISTRIBUTION", "VERSION")


def main(arguments: Sequence[str]) -> int:
    """Print tables. Listing imports manifests only; showing options imports the component.

    Raises:
        ConfigError: no such kind, component or preset; or its YAML does not match its class.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    kind, name, *more = (*arguments, "", "")[: max(2, len(arguments))]
    if any(more) or any(argument.startswith("-") or "=" in argument for argument in arguments):
        raise ConfigError("", "plugins takes at most a kind and a name; see rlplug plugins --help")
    groups = (*get_args(Kind), *GROUPS)
    if kind and kind not in groups:
        raise ConfigError("", f"unknown kind {kind!r}; {unknown(kind, groups)}")
    if not name:
        rows, presets, wrong = _listed([group for group in groups if group == kind or not kind])
        found = {"components": _records(rows), "presets": _records(presets), "problems": wrong}
        lines = table(COLUMNS, rows) if rows else []
        lines += ["", *table(("PRESET", *COLUMNS[1:]), presets)] if presets else []
        say(json.dumps(found) if as_json else "\n".join([*lines, *wrong]))
    elif kind in KINDS:
        _show(kind, name, as_json)
    else:
        head, chosen, values = _settings(kind, name)
        lines = [f"{key}={value}" for key, value in chosen.items()]
        lines = [head, *lines, *(f"{key}={show(value)}" for key, value in values.items())]
        say(json.dumps({"file": head, "choices": chosen, "settings": values}) if as_json else "\n".join(lines))
    return 0


def _records(rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(map(str.lower, COLUMNS), row, strict=True)) for row in rows]


def _listed(groups: Sequence[str]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], list[str]]:
    """Return rows of components, rows of further files to choose, and a line for each problem."""
    owners = {key: plugins for key, plugins in registry.owners().items() if key[0] in groups}
    rows = [(*key, plugin.distribution, plugin.version) for key, plugins in owners.items() for plugin in plugins]
    files = [files[0] for key, files in registry.presets().items() if key[0] in groups and key not in owners]
    files.sort(key=lambda file: groups.index(file.group))
    presets = [(file.group, file.option, file.plugin.distribution, file.plugin.version) for file in files]
    wrong: list[str] = []
    for (kind, name), plugins in owners.items():
        if len(plugins) > 1:
            ways = " or ".join(f"{plugin.distribution}/{name}" for plugin in plugins)
            wrong.append(f"clash: {kind} {name!r} is claimed by {' and '.join(map(str, plugins))}; choose {ways}")
    wrong += [f"shadowed: {line}" for line in registry.shadowed()]
    return rows, presets, wrong + [f"broken: {plugin}, skipped: {plugin.cause}" for plugin in registry.broken()]


def _show(kind: Kind, name: str, as_json: bool) -> None:
    """Print the details of a component, or of a preset, which is a component with other defaults.

    Raises:
        ConfigError: there is none, or its class is incomplete; after the table, an error in its YAML.
    """
    from rlplug.cli.options import options
    from rlplug.config import default_node
    from rlplug.contract.members import check_class

    file = registry.preset(kind, name) or _selecting(kind, name)
    node = default_node(kind, file.option) if file else {}
    component = str(node.get("name", name))
    cls, plugin = registry.load(kind, component), registry.owner(kind, component)
    check_class(kind, cls)
    target = plugin.components[kind, discovery.split(component)[1]].target
    rows = options(cls.Config, node)
    if as_json:
        about = {"kind": kind, "name": name, "component": component, "class": target, "distribution": str(plugin)}
        say(json.dumps({**about, "options": [row._asdict() for row in rows]}))
    else:
        say(f"{kind} {name}: {target}, of {plugin}{f'; {file}' if file and file.option != component else ''}")
        say("\n".join(table(("OPTION", "TYPE", "DEFAULT", "RANGE", ""), rows) if rows else ["It has no options."]))
    if file is None:
        wanted = f"conf/{kind}/{name}.yaml, with `name: {name}` and every option"
        raise ConfigError("", f"{plugin} has no YAML file that selects its {kind} {name!r}; add {wanted}")
    _check(kind, file, node)


def _selecting(kind: Kind, name: str) -> Preset | None:
    """Return the first file that selects a component, or None."""
    from rlplug.config import default_node

    registry.owner(kind, name)
    for (group, option), (file, *_) in registry.presets().items():
        with suppress(ConfigError):
            if group == kind and default_node(kind, option).get("name") == name:
                return file
    return None


def _check(kind: Kind, file: Preset, node: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless a file has a valid value or ``???`` for every option."""
    from rlplug.config import choose
    from rlplug.config.origins import blamed

    package = file.package if kind in ("exploration", "logger") else None
    key = package or kind
    nodes: Any = node
    for part in reversed(key.split(".")):
        nodes = {part: nodes}
    try:
        choose(kind, key, dict(node))
    except ConfigError as error:
        if wrong := [one for one in single(error) if not one.key or value_at(nodes, one.key) != MISSING]:
            raise blamed(joined(wrong), [(file.package or kind, file)], ()) from None


def _settings(group: str, name: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the title of a file, its choices and its settings."""
    if (file := registry.preset(group, name)) is None:
        names = [option for of, option in registry.presets() if of == group]
        raise ConfigError("", f"unknown {group} {name!r}; {unknown(name, names)}")
    try:
        content = yaml.safe_load(file.path.read_bytes()) or {}
        if not isinstance(content, dict):
            raise ValueError("it contains no settings")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("", f"{file} cannot be read: {one_line(str(error))}") from None
    defaults = content.pop("defaults", ())
    entries = [entry for entry in defaults if isinstance(entry, dict)] if isinstance(defaults, list) else []
    chosen = {str(key).split("/")[-1]: show(value).replace("'", "") for part in entries for key, value in part.items()}
    return f"{group} {name}: {file}", chosen, dict(_leaves(content))


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""Format tables of options from the code: every option with type, default, range and doc line.

    python docs/tables.py run             # the settings of a run
    python docs/tables.py algo/ppo        # the options of a component
    python docs/tables.py exploration     # those of all components of a kind, with the YAML files that choose them

The site has such a table at each marker ``<!-- options: run -->`` (see pages.py). Only rlplug's own components are
listed, so other installed packages do not change a page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from rlplug import registry
from rlplug.cli.options import options
from rlplug.config import Core, default_node
from rlplug.config.schema import SEVERAL
from rlplug.registry import Kind

CONF = registry.conf_folder("rlplug")
MARK = re.compile(r"<!-- options: (\S+) -->\n")


def table(config: Any, defaults: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a Markdown table of the fields of a ``Config``, nested ones as ``eval.every``."""
    rows = [row for name, *cells in _rows(config, defaults, prefix) for row in [_row(f"`{name}`", *cells)]]
    return [_row("option", "type", "default", "range", "meaning"), "|---" * 5 + "|", *rows] if rows else ["No options."]


def _rows(config: Any, defaults: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, ...]]:
    for option in options(config, defaults):
        inner = config.__pydantic_fields__[option.name].annotation
        if hasattr(inner, "__pydantic_fields__"):
            yield from _rows(inner, defaults[option.name], f"{prefix}{option.name}.")
        else:
            default = "must be given" if option.default == "???" else f"`{option.default}`"
            yield prefix + option.name, option.type, default, option.range, option.doc


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@cache
def nodes(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return the node of every YAML file of a kind."""
    return {path.stem: default_node(kind, path.stem) for path in sorted((CONF / kind).glob("*.yaml"))}


def files(kind: Kind, name: str) -> dict[str, dict[str, Any]]:
    """Return the YAML files that choose a component, with their nodes; the file of its name comes first."""
    found = {file: node for file, node in nodes(kind).items() if node["name"] == name}
    return {file: found[file] for file in sorted(found, key=lambda file: (file != name, file))}


def component(kind: Kind, name: str) -> list[str]:
    """Return the table of a component."""
    (file, node), *_ = files(kind, name).items()
    return table(registry.load(kind, name).Config, node, f"{kind}.{file}." if kind in SEVERAL else f"{kind}.")


def every(kind: Kind) -> Iterator[str]:
    """Yield the components of a kind, each with its table and the differences of its other YAML files."""
    for (of_kind, name), owners in registry.owners().items():
        if of_kind != kind or owners[0].distribution != "rlplug":
            continue
        (first, base), *others = files(kind, name).items()
        yield from ("", f"### {name}", "", f"`{_choose(kind, first)}`", "", *component(kind, name))
        for file, node in others:
            changes = [f"`{key}: {_yaml(value)}`" for key, value in node.items() if base[key] != value]
            yield from ("", f"`{_choose(kind, file)}` has " + ", ".join(changes) + ".")
    yield ""


def _choose(kind: Kind, file: str) -> str:
    return f"{kind}=[{file}]" if kind in SEVERAL else f"{kind}={file}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def generate(what: str) -> str:
    """Return the table for the marker ``<!-- options: {what} -->``."""
    if what == "run":
        lines = table(Core, yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8")))
    elif "/" in what:
        kind, name = what.split("/")
        lines = component(kind, name)  # type: ignore[arg-type]
    else:
        lines = list(every(what))  # type: ignore[arg-type]
    return "\n" + "\n".join(lines).strip() + "\n\n"


if __name__ == "__main__":
    print(*map(generate, sys.argv[1:] or ["run"]), sep="\n")

"""YAML files of packages: an option of a group is a file ``conf/<group>/<option>.yaml``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from rlplug.registry.discovery import Plugin, broken, plugins, until_refresh

HEADER = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


class Preset(NamedTuple):
    """One file of one package."""

    group: str
    option: str
    plugin: Plugin
    path: Path

    def __str__(self) -> str:
        return f"conf/{self.group}/{self.option}.yaml of {self.plugin}"

    @property
    def package(self) -> str | None:
        """Return the key of its settings, from its first line; None: not specified."""
        found = HEADER.search(self.path.read_text(encoding="utf-8"))
        return found and found[1]


@until_refresh
def presets() -> dict[tuple[str, str], tuple[Preset, ...]]:
    """Return the files for each (group, option), sorted; the first one is used."""
    found: dict[tuple[str, str], tuple[Preset, ...]] = {}
    for plugin in plugins():
        for path in plugin.files:
            group = path.parent.relative_to(plugin.conf).as_posix()  # type: ignore[arg-type]
            found[group, path.stem] = (*found.get((group, path.stem), ()), Preset(group, path.stem, plugin, path))
    return dict(sorted(found.items()))


def preset(group: str, option: str) -> Preset | None:
    """Return the file of an option; None: no package has it."""
    return presets().get((group, option), (None,))[0]


def shadowed() -> list[str]:
    """Return a line for each file that is shadowed by one of the same name in another package."""
    several = (files for (group, _), files in presets().items() if len(files) > 1 and group != ".")
    return [f"{other} is not used: there is {first}; rename it" for first, *others in several for other in others]


@until_refresh
def warn_broken() -> None:
    """Print one line on stderr for each broken plugin and each shadowed file, once per process."""
    for plugin in broken():
        print(f"rlplug: skipping the broken plugin {plugin}: {plugin.cause}", file=sys.stderr)
    for line in shadowed():
        print(f"rlplug: {line}", file=sys.stderr)

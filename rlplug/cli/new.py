"""``new``: write a working package of a new component."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import cast

import yaml

from rlplug import registry
from rlplug.cli import say, without_json
from rlplug.registry import KINDS, Kind, warn_broken
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

USAGE = """rlplug new <kind> <name> [--json]

Creates the package rlplug-<name>/ with a working component: a commented class, its options, the entry point,
and tests, including the conformance kit. Edit the class and keep the rest.

  <kind>   algo, model, buffer, exploration, env, loop, hardware, logger,
           curriculum or estimator
  <name>   name by which a run selects it, as in algo=<name>: lowercase letters, digits and _
  --json   print the folder and its files as one JSON object"""

TEMPLATES = Path(__file__).with_name("templates")
"""a folder per kind, and one for common files; see ``rendered``"""

LONGEST = 40  # characters in a name

WORDS: Mapping[Kind, str] = {
    "algo": "algo={name} env=cartpole",
    "model": "algo=ppo env=cartpole model={name}",
    "buffer": "algo=dqn env=cartpole buffer={name}",
    "exploration": "algo=dqn env=cartpole 'exploration=[{name}]'",
    "env": "algo=ppo env={name}",
    "loop": "algo=ppo env=cartpole loop={name}",
    "hardware": "algo=ppo env=cartpole hardware={name}",
    "logger": "algo=ppo env=cartpole 'logger=[{name}]'",
    "curriculum": "algo=ppo env=frozenlake_tasks curriculum={name}",
    "estimator": "algo=ppo env=cartpole 'estimator=[{name}]'",
}
"""command line to select a component of each kind"""


def main(arguments: Sequence[str]) -> int:
    """Write the package of a new component into the working directory.

    Raises:
        ConfigError: unknown kind, invalid or taken name, or the folder exists; nothing was written.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    arguments, as_json = without_json(arguments)
    if len(arguments) != 2 or any(argument.startswith("-") or "=" in argument for argument in arguments):
        raise ConfigError("", "new takes a kind and a name, as in `rlplug new algo mine`; see rlplug new --help")
    warn_broken()
    kind, name = arguments
    if kind not in KINDS:
        raise ConfigError("", f"unknown kind {kind!r}; {unknown(kind, KINDS)}")
    kind = cast(Kind, kind)
    folder = Path(f"rlplug-{name.replace('_', '-')}")
    _check_name(kind, name)
    files = rendered(kind, name)
    _check_class(name, files[f"rlplug_{name}/{kind}.py"])
    try:
        folder.mkdir()
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        said = f"{folder.absolute()} exists; choose another name or another working directory"
        raise ConfigError("", said) from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError("", f"{folder.absolute()} cannot be written: {error.strerror}") from error
    say(json.dumps({"folder": str(folder), "files": sorted(files)}) if as_json else _told(kind, name, folder, files))
    return 0


def rendered(kind: Kind, name: str) -> dict[str, str]:
    """Return the files of the package, ``path -> text``.

    A template is a file ``<path>.tmpl``. In path and text ``{{name}}``, ``{{kind}}``, ``{{Class}}``, ``{{package}}``,
    ``{{distribution}}`` and ``{{version}}`` are replaced. A kind's file replaces a common one of the same path.
    """
    values = {
        "name": name,
        "kind": kind,
        "Class": class_name(name),
        "package": f"rlplug_{name}",
        "distribution": f"rlplug-{name.replace('_', '-')}",
        "version": version("rlplug"),
    }

    def filled(text: str) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)

    return {
        filled(path.relative_to(root).as_posix().removesuffix(".tmpl")): filled(path.read_text(encoding="utf-8"))
        for root in (TEMPLATES / "common", TEMPLATES / kind)
        for path in sorted(root.rglob("*.tmpl"))
    }


def class_name(name: str) -> str:
    """Convert ``my_algo`` to ``MyAlgo``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _check_name(kind: Kind, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST:
        word = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_0123456789")
        example = f", as in {word}" if 0 < len(word) <= LONGEST else ""
        raise ConfigError("", f"{name!r} is not a name: use up to {LONGEST} lowercase letters, digits and _{example}")
    if iskeyword(name) or iskeyword(class_name(name)) or yaml.safe_load(name) != name or name in ("inf", "nan"):
        raise ConfigError("", f"{name!r} has another meaning in Python or YAML; choose another name")
    owners = [*registry.owners().get((kind, name), ())] or [
        plugin for plugin in registry.plugins() if plugin.conf and (plugin.conf / kind / f"{name}.yaml").is_file()
    ]
    if owners:
        raise ConfigError("", f"{kind} {name!r} is taken by {' and '.join(map(str, owners))}; choose another name")
    if find_spec(package := f"rlplug_{name}"):
        owner = next((str(x) for x in registry.plugins() if x.distribution == package.replace("_", "-")), package)
        raise ConfigError("", f"a package {package} is installed already ({owner}); choose another name")


def _check_class(name: str, source: str) -> None:
    """Check that the class does not shadow an import of its module."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    if class_name(name) in {alias.name for node in imports for alias in node.names}:
        raise ConfigError("", f"{name!r} needs a class {class_name(name)}, which it imports; choose another name")


def _told(kind: Kind, name: str, folder: Path, files: Mapping[str, str]) -> str:
    """Return a list of the written files and the next commands."""
    words = WORDS[kind].format(name=name)
    lines = {
        f"pip install -e '{folder}[test]'": "once, and again after a change of pyproject.toml",
        f"python -m rlplug plugins {kind} {name}": "its options",
        f"python -m rlplug check {words}": "check the configuration",
        f"python -m rlplug {words}": "train",
        f"python -m pytest {folder}": "its tests, and the conformance kit",
    }
    width = max(map(len, lines))
    return "\n".join(
        [
            f"created {folder}/ with a working {kind} {name}; begin with {folder / f'rlplug_{name}' / f'{kind}.py'}",
            *(f"  {path}" for path in sorted(files)),
            "",
            *(f"    {line.ljust(width)}   # {what}" for line, what in lines.items()),
        ]
    )

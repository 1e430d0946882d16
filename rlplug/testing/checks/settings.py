"""Check that a component's ``Config``, with types and docs, agrees with its YAML, with all defaults."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

from rlplug.config import choose, typed
from rlplug.registry import Kind, load
from rlplug.testing.checks.runs import node_of, options, require
from rlplug.types import ConfigError

MISSING = "???"


def check_settings(kind: Kind, name: str) -> None:
    """Check every YAML file that selects the component."""
    config: Any = getattr(load(kind, name), "Config", None)
    require(inspect.isclass(config), f"{kind} {name!r} has no class Config: decorate one with rlplug.settings.settings")
    require(
        hasattr(config, "__pydantic_fields__"),
        f"Config of {kind} {name!r} is an ordinary class: decorate it with rlplug.settings.settings",
    )
    for key, field in fields(config):
        require(field.description, f"option {key} has no doc line: write {key}: <type> = option('What it does.')")
        require(
            field.is_required(),
            f"option {key} has a default in the class: write defaults in the YAML only",
        )
    for option in options(kind, name):
        file = f"conf/{kind}/{option}.yaml"
        node = node_of(kind, option)
        del node["name"]
        in_yaml, in_class = set(keys(config, node)), {key for key, _ in fields(config)}
        missing, unknown = sorted(in_class - in_yaml), sorted(in_yaml - in_class)
        require(not missing, f"{file} lacks {', '.join(missing)}: write every option of the Config there")
        require(not unknown, f"{file} has {', '.join(unknown)}, which the Config does not know")
        if MISSING in node.values():
            continue
        cfg = choose(kind, kind, {"name": name, **node}).cfg
        require(pickle.loads(pickle.dumps(cfg)) == cfg, f"the settings of {file} do not survive pickling")
        refuses_unknown(config, node, file)


def refuses_unknown(config: type[Any], node: dict[str, Any], file: str) -> None:
    try:
        typed(config, {**node, "no_such_option": 1})
    except ConfigError:
        return
    require(False, f"Config accepts a key that {file} lacks: decorate it with rlplug.settings.settings")


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by full key, including nested ones."""
    for name, field in config.__pydantic_fields__.items():
        yield f"{prefix}{name}", field
        if hasattr(field.annotation, "__pydantic_fields__"):
            yield from fields(field.annotation, f"{prefix}{name}.")


def keys(config: Any, node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a node, including nested options."""
    for name, value in node.items():
        yield f"{prefix}{name}"
        field = config.__pydantic_fields__.get(name)
        if field is not None and hasattr(field.annotation, "__pydantic_fields__") and isinstance(value, dict):
            yield from keys(field.annotation, value, f"{prefix}{name}.")

"""pydantic's errors -> messages with the full key, what is wrong and what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from rlplug.registry import unknown
from rlplug.types import ConfigError

Path = tuple[str | int, ...]
RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of", "too_short", "too_long")
WRONG = dict.fromkeys(RANGES, "is out of range") | {"literal_error": "is none of the options"}
SURPLUS = "^Input (should be )?|(, unable|, got| or an instance of) .*"


def explain(error: ValidationError, node: dict[str, Any], config: type[Any], key: str = "") -> list[ConfigError]:
    """Return one error for each mistake in ``node``, the settings at ``key``, which have to fit ``config``."""
    found: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_path(item, node), []).append(item)
    errors: list[ConfigError] = []
    for path, items in found.items():
        if any(path == other[: len(path)] for other in found if other != path):
            continue  # another branch of a union accepts the type of the value and refuses a part of it
        if items[0]["type"] == "unexpected_keyword_argument":
            errors.append(unknown_key(dotted(key, *path), _fields(config, path[:-1])))
        else:
            errors.append(_mistake(dotted(key, *path), items))
    return errors


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Return several mistakes as one error with a line for each."""
    return errors[0] if len(errors) == 1 else ConfigError("", "\n".join(map(str, errors)))


def unknown_key(key: str, siblings: Iterable[str]) -> ConfigError:
    """Return ``algo.gama: unknown key; did you mean algo.gamma? There are: gamma, ...``"""
    parent, _, last = key.rpartition(".")
    return ConfigError(key, f"unknown key; {unknown(last, siblings, parent)}")


def no_such_key(tree: Mapping[str, Any], key: str) -> ConfigError:
    """Return an error that suggests a sibling, or keys elsewhere with that name: ``algo.gamma`` for ``gamma``."""
    parent, _, last = key.rpartition(".")
    node = value_at(tree, parent, {}) if parent else tree
    if not isinstance(node, Mapping):
        return ConfigError(key, f"unknown key: {parent} is a single value and has no keys")
    siblings = [str(name) for name in node if name != "hydra"]
    elsewhere = [path for path in _leaves(tree) if path.endswith(f".{last}") and not path.startswith("hydra.")]
    if elsewhere and not get_close_matches(last, siblings, cutoff=0.85):
        return ConfigError(key, f"unknown key; did you mean {' or '.join(elsewhere)}?")
    return unknown_key(key, siblings)


def already_there(key: str) -> ConfigError:
    """Return the error for ``+key=value`` when the key exists."""
    return ConfigError(key, f"exists already: write {key}=<value>, without +")


def value_at(tree: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key of nested mappings; ``default`` if there is none."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def _leaves(node: Any, path: str = "") -> list[str]:
    """Return the dotted keys of all leaves."""
    if not isinstance(node, Mapping):
        return [path]
    return [leaf for key, value in node.items() for leaf in _leaves(value, dotted(path, str(key)))]


def dotted(key: str, *path: str | int) -> str:
    """Return ``algo.lr[0][1]`` for ``("lr", 0, 1)`` below ``algo``."""
    for part in path:
        key = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}" if key else part
    return key


def show(value: Any) -> str:
    """Return a value as it is written in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _path(item: Any, node: Any) -> Path:
    """Return the path of a mistake in ``node``: pydantic's location without the names of the branches of unions."""
    path: Path = ()
    for part in item["loc"]:
        with suppress(LookupError, TypeError):
            node, path = node[part], (*path, part)
    return (*path, item["loc"][-1]) if item["type"] == "missing" else path


def _mistake(key: str, items: list[Any]) -> ConfigError:
    """Return what is wrong with one value: a mistake for each branch of a union, or one."""
    items = [item for item in items if not item["type"].endswith("_type")] or items
    kind, value = items[0]["type"], show(items[0]["input"])
    if kind == "missing":
        return ConfigError(key, "is missing")
    text = " or ".join(re.sub(SURPLUS, "", item["msg"]) for item in items).replace("dictionary", "mapping")
    return ConfigError(key, f"{value} {WRONG.get(kind, 'has the wrong type')}: should be {text}")


def _fields(config: Any, path: Path) -> list[str]:
    """Return the names of the fields of the settings at a path; none where there are no settings."""
    for part in path:
        config = getattr(config, "__pydantic_fields__", {})[part].annotation
    return list(getattr(config, "__pydantic_fields__", {}))

"""pydantic's errors -> lines that a person reads: the full key, what is wrong, what would be right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from rlplug.registry import unknown
from rlplug.types import ConfigError

Path = tuple[str | int, ...]
RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of", "too_short", "too_long")


def explain(error: ValidationError, node: dict[str, Any], config: type[Any], key: str = "") -> list[ConfigError]:
    """One error for each mistake.

    Args:
        node: what was validated.
        config: the ``Config`` it was validated against.
        key: where the node stands in the run's configuration.
    """
    unions: dict[Path, dict[str, list[tuple[Path, Any]]]] = defaultdict(lambda: defaultdict(list))
    errors: list[ConfigError] = []
    for item in error.errors(include_url=False):
        path, branch, depth = _locate(item["loc"], node)
        if branch is not None:
            unions[path[:depth]][branch].append((path, item))
        elif item["type"] == "unexpected_keyword_argument":
            errors.append(unknown_key(dotted(key, path), _fields(config, path[:-1])))
        else:
            errors.append(_mistake(dotted(key, path), [item]))
    for path, branches in unions.items():
        errors += _union(path, list(branches.values()), key)
    return errors


def as_one(errors: Sequence[ConfigError]) -> ConfigError:
    """Several mistakes as one error, a line each."""
    return errors[0] if len(errors) == 1 else ConfigError("", "\n".join(map(str, errors)))


def unknown_key(key: str, siblings: Iterable[str]) -> ConfigError:
    """``algo.gama: unknown key; did you mean algo.gamma? There are: gamma, ...``"""
    return ConfigError(key, f"unknown key; {unknown(key.rpartition('.')[2], siblings, key.rpartition('.')[0])}")


def no_such_key(tree: Mapping[str, Any], key: str) -> ConfigError:
    """What was meant: a neighbour with nearly that name, or keys elsewhere with the same last part, ``algo.gamma`` for
    ``gamma``, or else any neighbour."""
    parent, _, last = key.rpartition(".")
    node: Any = tree
    for part in parent.split(".") if parent else []:
        node = node.get(part, {}) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        return ConfigError(key, f"unknown key: {parent} holds one value, and no keys")
    siblings = [str(name) for name in node if name != "hydra"]
    elsewhere = [path for path in _leaves(tree) if path.endswith(f".{last}") and not path.startswith("hydra.")]
    if elsewhere and not get_close_matches(last, siblings, cutoff=0.85):
        return ConfigError(key, f"unknown key; did you mean {' or '.join(elsewhere)}?")
    return unknown_key(key, siblings)


def _leaves(node: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of all leaves."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, dotted(path, (str(key),)))
    else:
        yield path


def dotted(key: str, path: Sequence[str | int]) -> str:
    """``("lr", 0, 1)`` below ``algo`` is ``algo.lr[0][1]``."""
    for part in path:
        key = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}" if key else part
    return key


def show(value: Any) -> str:
    """A value as one writes it in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _locate(loc: Path, node: Any) -> tuple[Path, str | None, int]:
    """Split pydantic's location into the path in the data and the branch of a union that was tried.

    Returns:
        The path, the branch's label or None, and how much of the path stands in front of the union.
    """
    path: list[str | int] = []
    branch, depth = None, 0
    for i, part in enumerate(loc):
        missing = i == len(loc) - 1
        if isinstance(part, int) or (isinstance(node, dict) and (part in node or missing)):
            path.append(part)
            found = part in node if isinstance(node, dict) else part in range(len(node))
            node = node[part] if found else None
        elif branch is None:
            branch, depth = part, len(path)
    return tuple(path), branch, depth


def _union(path: Path, branches: list[list[tuple[Path, Any]]], key: str) -> list[ConfigError]:
    """A value that fits no branch of a union: speak of the branches that it was meant for."""
    meant = [b for b in branches if not all(p == path and item["type"].endswith("_type") for p, item in b)] or branches
    if any(p != path for branch in meant for p, _ in branch):
        return [_mistake(dotted(key, p), [item]) for branch in meant for p, item in branch]
    return [_mistake(dotted(key, path), [item for branch in meant for _, item in branch])]


def _mistake(key: str, items: list[Any]) -> ConfigError:
    kind, value = items[0]["type"], show(items[0]["input"])
    if kind == "missing":
        return ConfigError(key, "is missing")
    expected = " or ".join(_expected(item) for item in items)
    if kind in RANGES:
        return ConfigError(key, f"{value} is out of range: should be {expected}")
    if kind == "literal_error":
        return ConfigError(key, f"{value} is none of the options: should be {expected}")
    return ConfigError(key, f"{value} has the wrong type: should be {expected}")


def _expected(item: Any) -> str:
    if item["type"] == "dataclass_type":
        return "a mapping of keys to values"
    return re.split(", (?:unable|got) ", item["msg"].removeprefix("Input ").removeprefix("should be "))[0]


def _fields(config: Any, path: Path) -> list[str]:
    """Names of the fields of the settings at a path; none where there are no settings."""
    for part in path:
        config = getattr(config, "__pydantic_fields__", {})[part].annotation
    return list(getattr(config, "__pydantic_fields__", {}))

"""Messages about a configuration: errors, with the full key and a fix, and changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path as File
from typing import Any, TypeAlias, get_args

import yaml
from pydantic import ValidationError

from rlplug.registry.discovery import unknown
from rlplug.settings import LARGEST, is_schedule
from rlplug.types import ConfigError

Path = tuple[str | int, ...]
SIZE = "int_parsing_size"
RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of", "too_short", "too_long")
RANGES = (*RANGES, "finite_number")
WRONG = dict.fromkeys(RANGES, "is out of range") | {"literal_error": "is none of the options", SIZE: "is out of range"}
MOST = 8  # mistakes in one message
SURPLUS = r"^Input (should be )?|^\w+ should (?=have )|(, unable|, got| or an instance of| after) .*"


Refusals: TypeAlias = Iterable[tuple[object, str, str | Callable[[], str]]]
"""a table of condition, key and sentence; a function computes the sentence lazily"""


def refuse(rows: Refusals) -> None:
    """Raise ``ConfigError`` with key and sentence of the first row with a true condition."""
    for wrong, key, sentence in rows:
        if wrong:
            raise ConfigError(key, sentence if isinstance(sentence, str) else sentence())


class UnknownKeyError(ConfigError):
    """An unknown key, for which a caller with the whole configuration can suggest others."""


class JoinedError(ConfigError):
    """Several errors, one per line; of more than ``MOST`` the message has the first."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        shown = errors if len(errors) <= MOST else errors[: MOST - 1]
        more = [f"and {len(errors) - len(shown)} more"] * (len(shown) < len(errors))
        super().__init__("", "\n".join([*map(str, shown), *more]))
        self.errors = errors


@cache
def peers(kind: str) -> dict[str, Any]:
    """Return terms of other libraries for ``keys``, each with its candidates here, or for ``options`` of a group."""
    return yaml.safe_load(File(__file__).with_name("peers.yaml").read_bytes())[kind]


def mistakes(error: ValidationError, node: Any, config: type[Any], key: str = "") -> list[ConfigError]:
    """Return one error for each mistake in ``node``, the settings of type ``config`` at ``key``."""
    found: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_path(item, node), []).append(item)
    # if another path extends this one, that branch of the union accepts the type and rejects a part of the value
    ends = [path for path in found if not any(path == other[: len(path)] for other in found if other != path)]
    return [_mistake(key, path, found[path], config) for path in ends]


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """Join errors to one, with a line for each."""
    return errors[0] if len(errors) == 1 else JoinedError(errors)


def single(error: ConfigError) -> Sequence[ConfigError]:
    """Split an error into its single errors."""
    return error.errors if isinstance(error, JoinedError) else [error]


def unknown_key(key: str, siblings: Iterable[str]) -> ConfigError:
    """Return ``algo.gama: unknown key; did you mean algo.gamma? There are: gamma, ...``"""
    parent, _, last = key.rpartition(".")
    said = unknown(last, siblings := [*siblings], parent)
    if "kwargs" in siblings and last.isidentifier() and not said.startswith("did you mean"):
        said = f"an argument of its constructor is written +{parent}.kwargs.{last}=<value>; {said}"
    return UnknownKeyError(key, f"unknown key; {said}")


def no_such_key(tree: Mapping[str, Any], key: str) -> ConfigError:
    """Return an error that suggests keys by other libraries' terms, a sibling, or keys elsewhere of that name."""
    if others := _called(tree, key):
        return ConfigError(key, f"unknown key; did you mean {' or '.join(others)}?")
    parts = key.split(".")  # the first missing one is at fault
    heads = (".".join(parts[: i + 1]) for i in range(len(parts)))
    if (key := next((head for head in heads if value_at(tree, head, parts) is parts), "")) == "":
        return ConfigError(".".join(parts), "cannot be set here")
    parent, _, last = key.rpartition(".")
    node = value_at(tree, parent) if parent else tree
    if not isinstance(node, Mapping):
        said = f"null here; write {parent}={{{last}: ...}}" if node is None else "a single value and has no keys"
        return ConfigError(key, f"unknown key: {parent} is {said}")
    siblings = [str(name) for name in node if name != "hydra"]
    if not siblings:
        return ConfigError(key, f"unknown key; there are none yet, and a new one is written with +: +{key}=<value>")
    if not get_close_matches(last, siblings, cutoff=0.85):
        known = {*peers("keys"), *(path.rpartition(".")[2] for path in _leaves(tree) if path.count("."))}
        for name in (key, *get_close_matches(last, known, n=1, cutoff=0.85)):
            if others := elsewhere(tree, name):
                return ConfigError(key, f"unknown key; did you mean {' or '.join(others)}?")
    return unknown_key(key, siblings)


def elsewhere(tree: Mapping[str, Any], key: str) -> list[str]:
    """Return the keys that another library calls by the last part of ``key``, or those of that name elsewhere.

    Keys of the algorithm come first.
    """
    named = [path for path in _leaves(tree) if f".{path}".endswith(f".{key.rpartition('.')[2]}") and path != key]
    named.sort(key=lambda path: not path.startswith("algo."))
    return _called(tree, key) or [path for path in named if not path.startswith("hydra.")]


def _called(tree: Mapping[str, Any], key: str) -> list[str]:
    meanings = peers("keys").get(key.rpartition(".")[2].lower().replace("-", "_"), ())
    others = [meant for meant in meanings if not f"{key}.".startswith(f"{meant}.")]
    return [meant for meant in others if value_at(tree, meant, meanings) is not meanings]


def value_at(tree: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key of nested mappings; ``default`` if there is none."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def dotted(key: str, *path: str | int) -> str:
    """Return ``algo.lr[0][1]`` for ``("lr", 0, 1)`` below ``algo``."""
    below = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return (key + below).removeprefix(".")


def show(value: Any) -> str:
    """Format a value as in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], key: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for each difference; None: a missing value or mapping."""
    found: list[tuple[str, Any, Any]] = []
    for part in {**old, **new}:
        before, after, path = old.get(part), new.get(part), dotted(key, part)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, path)
        elif repr(before) != repr(after):  # because 1 == True == 1.0
            found.append((path, before, after))
    return found


def told(changed: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Format each of ``differences``: ``total_steps: 20000 -> 40000`` or ``+ logger.wandb``."""
    lines: list[str] = []
    for key, old, new in changed:
        whole = isinstance(old, Mapping) or isinstance(new, Mapping)
        lines.append(f"{'-' if new is None else '+'} {key}" if whole else f"{key}: {show(old)} -> {show(new)}")
    return lines


def _leaves(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, dotted(path, str(key)))
    else:
        yield path


def _path(item: Any, node: Any) -> Path:
    """Return the path of an error in ``node``: pydantic's location without names of union branches."""
    path: Path = ()
    for part in item["loc"]:
        with suppress(LookupError, TypeError):
            node, path = node[part], (*path, part)
    return (*path, item["loc"][-1]) if item["type"] == "missing" else path


def _mistake(key: str, path: Path, items: list[Any], config: Any) -> ConfigError:
    """Return the error of the value at one path, from one item or one per branch of a union."""
    key = dotted(key, *path)
    items = [item for item in items if not item["type"].endswith("_type")] or items
    kind, value = items[0]["type"], show(items[0]["input"])
    if kind == "missing":
        return ConfigError(key, "is missing")
    if kind == "unexpected_keyword_argument":
        for part in path[:-1]:
            config = config.__pydantic_fields__[part].annotation
        return unknown_key(key, getattr(config, "__pydantic_fields__", ()))
    text = " or ".join(re.sub(SURPLUS, "", item["msg"]) for item in items).replace("dictionary", "mapping")
    text = f"less than or equal to {LARGEST}" if kind == SIZE else text
    text = text if text.startswith("have ") else f"be {text}"
    field = config.__pydantic_fields__.get(path[0]) if path else None
    if kind not in WRONG and len(path) == 1 and field is not None and any(map(is_schedule, get_args(field.annotation))):
        text = text.replace(" or a valid list", "") + ", or a schedule such as [[0, 0.001], [100_000, 0]]"
    return ConfigError(key, f"{value} {WRONG.get(kind, 'has the wrong type')}: should {text}{_hint(key, items[0])}")


def _hint(key: str, item: Any) -> str:
    """Return a hint on the probable intention of a wrong value; empty if unknown."""
    if item["type"] == "int_parsing" and (found := re.fullmatch(r"(\d+\.?\d*) ?([kmb])", item["input"].lower())):
        return f", as in {round(float(found[1]) * {'k': 1e3, 'm': 1e6, 'b': 1e9}[found[2]]):_}"
    meant = peers("values").get(key, {}).get(show(item["input"]))
    return f"; did you mean {meant}?" if meant else ""

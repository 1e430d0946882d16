"""Values and keys with newlines, wherever they stand in a configuration, begin no line of a message."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from rlplug import ConfigError
from rlplug.config import compose, parse
from tests.tools.checkpoints import RUNS, SHORT

FORGED = "x\nrlplug: FORGED"


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values of nested dicts and lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def forgeries(raw: Any, at: tuple[Any, ...]) -> Iterator[Any]:
    """Yield copies of a configuration with a forged value, and a forged key, at a path."""
    for value in (FORGED, {FORGED: FORGED}, None):
        node = inner = copy.deepcopy(raw)
        for key in at[:-1]:
            inner = inner[key]
        if value is not None:
            inner[at[-1]] = value
        elif isinstance(inner, dict):
            inner[FORGED] = inner.pop(at[-1])
        yield node


def test_no_message_has_a_forged_line():
    tried: set[tuple[Any, ...]] = set()
    refused, forged = 0, []
    for words in RUNS.values():
        raw = compose([*SHORT, *words]).raw
        names = {key: node.get("name") for key, node in raw.items() if isinstance(node, dict)}
        for at in places(raw):
            if (place := (names.get(at[0]), *at)) in tried:
                continue
            tried.add(place)
            for node in forgeries(raw, at):
                try:
                    parse(node)
                except ConfigError as error:
                    refused += 1
                    if "\nrlplug: FORGED" in str(error):
                        forged.append((at, str(error)))
    assert refused > 1000
    assert forged == []

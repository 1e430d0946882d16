"""``diff``: how two runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlplug.cli import say, table
from rlplug.config.errors import show
from rlplug.types import ConfigError

USAGE = """rlplug diff <run> <run> [--json]

Shows how two runs differ: their settings, versions of libraries and plugins, machine and commit; and their final
figures. A run is a folder, or the name of one below runs/. --json prints one JSON object, with an empty string for what
a run does not have."""

WIDEST = 48  # characters of a value in the table; --json has all of it


def main(arguments: Sequence[str]) -> int:
    """Compare two runs.

    Raises:
        ConfigError: there are not two, or one of them cannot be read.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    places = [argument for argument in arguments if argument != "--json"]
    if flags := [word for word in places if word.startswith("-")]:
        raise ConfigError("", f"diff takes no flag {flags[0]}; see rlplug diff --help")
    if len(places) != 2:
        raise ConfigError("", f"diff takes two runs, not {len(places)}; see rlplug diff --help")

    from rlplug.results.diff import differences  # here, because NumPy is slow to import
    from rlplug.results.find import single

    a, b = map(single, places)
    found = differences(a, b)
    if "--json" in arguments:
        pairs = {subject: {key: list(pair) for key, pair in of.items()} for subject, of in found.items()}
        say(json.dumps({"a": str(a.path), "b": str(b.path), **pairs}))
        return 0
    lines = [f"a  {a.path}", f"b  {b.path}"]
    for subject, of in found.items():
        if of:
            lines += ["", *table((subject, "a", "b"), [(key, _cell(x), _cell(y)) for key, (x, y) in of.items()])]
        else:
            lines += ["", f"{subject}: equal"]
    say("\n".join(lines))
    return 0


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:,.6g}" if isinstance(value, float) else show(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"

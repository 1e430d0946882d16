"""``data``: summarize recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlplug.cli import say, tell
from rlplug.types import ConfigError

USAGE = """rlplug data <files, folders or patterns ...> [--json]

Summarizes recorded episodes: their number, returns, lengths, spaces, keys, their coverage, and what is
missing. Reads the same files as data.path. Skips and names parts that cannot be read or contain numbers that are not
finite, and exits with code 1; counts an episode without an end as truncated. --json prints one JSON object."""


def main(arguments: Sequence[str]) -> int:
    """Describe recorded episodes, and return the exit code: 1 if parts of them are unreadable.

    Raises:
        ConfigError: there are none, or none are readable.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    paths = [argument for argument in arguments if argument != "--json"]
    if flags := [path for path in paths if path.startswith("-")]:
        raise ConfigError("", f"data has no flag {flags[0]}; see rlplug data --help")
    if settings := [path for path in paths if "=" in path and not Path(path).exists()]:
        raise ConfigError("", f"data takes paths and no settings: {settings[0].partition('=')[2]}, not {settings[0]}")
    if not paths:
        raise ConfigError("", "data takes files, folders or patterns of recorded episodes; see rlplug data --help")

    from rlplug.data.describe import describe, table  # here, because pyarrow is slow to import
    from rlplug.data.recording import Recording
    from rlplug.data.source import Reading

    reading = Reading(damaged="skip", unfinished="truncate")
    about = describe(Recording(paths, reading))
    for note in reading.notes:
        tell(note)
    say(json.dumps(about) if "--json" in arguments else table(about))
    return 1 if reading.counts["damaged"] else 0

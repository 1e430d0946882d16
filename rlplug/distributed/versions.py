"""Comparison of installed versions between the processes of a run."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from rlplug.registry.discovery import installed
from rlplug.types import ConfigError


def check_same(there: Mapping[str, str], who: str) -> None:
    """Compare the installed versions of this process, ``who``, with ``installed()`` of rank 0.

    Raises:
        ConfigError: a version of rlplug, a library or a plugin differs or is missing on one side.
    """
    here = installed()
    for name in sorted(here.keys() | there.keys()):
        mine, first = (side.get(name, "not installed") for side in (here, there))
        if mine != first:
            where = f"for {who}, on {platform.node()}, and {first} for the first rank"
            raise ConfigError("hardware", f"{name} is {mine} {where}: install the same version on both")

"""Suggestions of offline algorithms, for an algorithm that does not support the actions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rlplug import registry
from rlplug.config import RunConfig, choose
from rlplug.types import ConfigError, EnvSpec

LOOP = re.compile(r"override /loop: *(\w+)")


@contextmanager
def of_recordings(config: RunConfig, spec: EnvSpec) -> Iterator[None]:
    """Add suggestions of offline algorithms to an error about ``algo``, if the run has a dataset."""
    try:
        yield
    except ConfigError as error:
        if error.key != "algo" or config.data.path is None or not (ways := serving(spec)):
            raise
        said = f"use algo={' or '.join(ways)}, which learn from datasets"
        raise ConfigError("algo", f"{error.message.partition('; ')[0]}; {said}") from None


def serving(spec: EnvSpec) -> list[str]:
    """Return the algorithms whose YAML chooses a loop for datasets, and which support these spaces."""
    from rlplug.config import default_node  # here, because it imports Hydra

    found: list[str] = []
    for name in registry.names("algo"):
        file = registry.preset("algo", name)
        loops = LOOP.findall(file.path.read_text(encoding="utf-8")) if file else []
        with suppress(ConfigError):  # do not suggest components that cannot be imported
            if any(registry.load("loop", loop).reads for loop in loops):
                choose("algo", "algo", default_node("algo", name)).needs(spec)
                found.append(name)
    return found

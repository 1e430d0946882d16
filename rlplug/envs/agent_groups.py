"""Groups of agents with equal spaces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from gymnasium.spaces import Space

from rlplug.envs.spaces import in_words
from rlplug.types import KEYS, ConfigError

Spaces = Mapping[str, tuple[Space[Any], Space[Any]]]


def grouped(spaces: Spaces, patterns: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the agents of every group, in the order of ``spaces``.

    Without patterns, agents with equal spaces form a group, named after what their names have in common.

    Args:
        spaces: observation and action space of every agent.
        patterns: by group, patterns of the names of its agents, such as ``hunter_*``.

    Raises:
        ConfigError: an agent is in no group or in two, a pattern matches none, or the spaces of a group differ.
    """
    if not patterns:
        return _by_spaces(spaces)
    every = ", ".join(spaces)
    groups: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {}
    for name, wanted in patterns.items():
        if name in KEYS:
            raise ConfigError(f"env.groups.{name}", "is a key of batches; give the group another name")
        for pattern in wanted:
            if not any(fnmatchcase(agent, pattern) for agent in spaces):
                raise ConfigError(f"env.groups.{name}", f"no agent matches {pattern!r}; the agents are {every}")
        groups[name] = tuple(agent for agent in spaces if any(fnmatchcase(agent, pattern) for pattern in wanted))
        if not groups[name]:
            raise ConfigError(f"env.groups.{name}", f"has no agents; the agents are {every}")
        for agent in groups[name]:
            if agent in taken:
                raise ConfigError(f"env.groups.{name}", f"has {agent}, which is in the group {taken[agent]} too")
            taken[agent] = name
        first, *others = groups[name]
        for other in others:
            if spaces[other] != spaces[first]:
                shown = (f"{agent} {', '.join(in_words(space) for space in spaces[agent])}" for agent in (first, other))
                raise ConfigError(f"env.groups.{name}", f"has agents with different spaces: {'; '.join(shown)}")
    if left := [agent for agent in spaces if agent not in taken]:
        raise ConfigError("env.groups", f"names no group for {', '.join(left)}")
    return groups


def _by_spaces(spaces: Spaces) -> dict[str, tuple[str, ...]]:
    found: list[list[str]] = []
    for agent, own in spaces.items():
        same = next((group for group in found if spaces[group[0]] == own), None)
        if same is None:
            found.append([agent])
        else:
            same.append(agent)
    groups: dict[str, tuple[str, ...]] = {}
    for number, agents in enumerate(found):
        shared = takewhile(lambda letters: len({*letters}) == 1, zip(*agents, strict=False))
        common = "".join(letter for letter, *_ in shared)
        name = re.sub(r"[\W_]*\d*$", "", common) or ("agents" if len(found) == 1 else f"agents_{number}")
        while name in groups or name in KEYS:
            name = f"{name}_{number}"
        groups[name] = tuple(agents)
    return groups

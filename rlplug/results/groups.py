"""Runs grouped by their settings without the seed, and how the groups differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplug.config.errors import show
from rlplug.results.record import RunRecord

OUTPUTS = ("seed", "record", "logger", "checkpoint", "eval.record")
"""settings that do not separate groups: the seed, and what a run writes"""
FORKED = "forked.step"
"""key by which forks are distinguished from other runs of the same settings"""
SHOWN = 3  # settings in a label
WIDEST = 24  # characters of a setting in a label


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed only.

    Attributes:
        label: the algorithm, with its environment and settings where these differ between groups.
        method: the label without the environment.
    """

    label: str
    method: str
    env: str
    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Group runs by their settings, except ``OUTPUTS``, in order of appearance; labels are unique."""
    found: dict[str, tuple[dict[str, Any], list[RunRecord]]] = {}
    has_forks = any(run.forked for run in runs)
    for run in runs:
        settings = {key: value for key, value in flat(run.config) if not _is_output(key)}
        if has_forks:  # a fork had other settings before its checkpoint
            settings[FORKED] = run.forked.get("step")
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), (settings, []))[1].append(run)
    firsts = [(settings, members[0]) for settings, members in found.values()]
    several_envs = len({first.env for _, first in firsts}) > 1
    groups: list[Group] = []
    for settings, members in found.values():
        run = members[0]
        like = [other for other, first in firsts if (first.algo, first.env) == (run.algo, run.env)]
        method = " ".join([run.algo, *_short(settings, distinguishing(like))])
        same = sum((group.method, group.env) == (method, run.env) for group in groups)
        method += f" #{same + 1}" if same else ""
        groups.append(Group(f"{method}, {run.env}" if several_envs else method, method, run.env, settings, members))
    return groups


def repeated(groups: Sequence[Group]) -> list[str]:
    """Return a line for each group in which several runs have the same seed."""
    lines: list[str] = []
    for group in groups:
        seeds = [run.config.get("seed") for run in group.runs]
        if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
            lines.append(f"{group.label}: {seeds.count(twice[0])} runs have seed {twice[0]}, and each of them counts")
    return lines


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that all of ``settings`` have, with different values."""
    first, *others = settings
    return [
        key
        for key, value in first.items()
        if all(key in other for other in others) and any(repr(other[key]) != repr(value) for other in others)
    ]


def distinguishing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return few keys by whose values ``settings`` can be told apart, those of the algorithm first."""
    chosen: list[str] = []
    told = 1
    for key in sorted(differing(settings), key=lambda key: not key.startswith("algo.")):
        if (apart := len({repr([one[name] for name in (*chosen, key)]) for one in settings})) > told:
            chosen, told = [*chosen, key], apart
    return chosen


def partial(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that some of ``settings`` have, and others do not."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if not all(key in one for one in settings)]


def flat(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings; an empty mapping is a value."""
    for name, value in node.items():
        path = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value


def _is_output(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in OUTPUTS)


def _short(settings: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Format settings compactly, by the last part of their key unless two of them share it."""
    lasts = [key.rpartition(".")[2] for key in keys]
    words: list[str] = []
    for key, last in zip(keys[:SHOWN], lasts, strict=False):
        value = show(settings[key]).strip("'")
        value = value if len(value) <= WIDEST else value[: WIDEST - 1] + "…"
        words.append(f"{last if lasts.count(last) == 1 and last != 'name' else key}={value}")
    return [*words, f"+{len(keys) - SHOWN}"] if len(keys) > SHOWN else words

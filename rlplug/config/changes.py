"""Changes to the configuration of an existing run by a command line, to resume or evaluate it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from rlplug.config.composition import composed, plain
from rlplug.config.errors import Refusals, joined, refuse, value_at
from rlplug.config.explain import EXISTS, GROUPS, explained, no_such_key_of
from rlplug.config.schema import RESUMABLE, SEVERAL, WHY, kind_of, scheduled
from rlplug.types import ConfigError

STRETCH = "schedules=stretch"
ABSENT = object()
ONLY = ".only"  # of logger.only=[wandb]


def change(raw: Mapping[str, Any], overrides: Sequence[str], may: Sequence[str], why: str) -> dict[str, Any]:
    """Apply a command line as in training. The result is not validated; see ``parse``.

    The configuration is not recomposed, because defaults may have changed since; only groups on the command line are
    read from YAML. Only the keys ``may`` and keys below them may change; ``why`` is the reason given in errors.

    Raises:
        ConfigError: a key does not exist or may not change, or the command line cannot be read.
    """
    if flags := [override for override in overrides if override.startswith("-")]:
        raise ConfigError("", f"unknown flag {flags[0]}; settings are written key=value")
    with explained(overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    settings: dict[str, Any] = _literal(raw)
    try:
        config = OmegaConf.create(settings, flags={"struct": True})
    except RecursionError:
        raise ConfigError("", "config.yaml cannot be read: it is nested too deeply") from None
    for override in sorted(parsed, key=_chooses, reverse=True):
        key = override.package or override.key_or_group.removesuffix(ONLY)  # critic_model for model@critic_model=mlp
        refuse(_refusals(override, key, raw, may, why))
        value, chooses = override.value(), _chooses(override)
        if override.is_add() and value_at(config, key) is not None and not isinstance(value, dict):
            raise ConfigError(key, EXISTS.format(key))
        add = override.is_add() or override.is_force_add()
        if value_at(config, key, ABSENT) is ABSENT and not add:
            raise no_such_key_of(config, key)
        try:
            if chooses:  # keep interpolations in the group's YAML, which refer to the run
                words = (f"logger{ONLY}=[]", f"{override.input_line}", "~algo", "tuned=none")
                value = OmegaConf.to_container(composed(words)[key])
                if override.key_or_group == "logger":  # adds to the run's loggers
                    value = {**value, **config.logger}  # type: ignore[dict-item]
            chooses |= key == "stop"  # replaced as a whole
            OmegaConf.update(config, key, value, merge=not chooses, force_add=add or chooses)
        except (ConfigKeyError, ConfigAttributeError) as error:
            raise no_such_key_of(config, str(error.full_key)) from None
    return plain(config, overrides)


def resumed(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply a command line of ``resume``: ``RESUMABLE`` keys, options with schedules, and ``STRETCH``.

    Raises:
        ConfigError: see ``change``.
    """
    words = [word for word in overrides if word != STRETCH]
    for word in words:
        if word.startswith("schedules="):
            raise ConfigError("schedules", f"{word.partition('=')[2]!r} is none of the options: should be 'stretch'")
    return change(raw, words, (*RESUMABLE, *_scheduled(raw)), WHY)


def extended(raw: Mapping[str, Any], before: int, stretch: bool) -> tuple[dict[str, Any], list[str]]:
    """Extend a valid configuration with a previous ``total_steps`` of ``before``; also return notes on its schedules.

    Args:
        stretch: stretch schedules that ended there, and step sizes (``lr``, ``..._lr``) that end at 0, to the new
            total.

    Raises:
        ConfigError: a step size is 0 in the additional steps, or there is no schedule to stretch.
    """
    new, total, errors, notes = deepcopy(dict(raw)), raw["total_steps"], list[ConfigError](), list[str]()
    for key, points in _scheduled(raw).items() if total != before else ():
        end, last = points[-1] if isinstance(points, list) else (total, points)
        stuck = last == 0 and end < total and re.search(r"(\.|_)lr$", key)
        if end >= total or not (stuck or end == before):
            continue
        if stretch:
            node, _, option = key.rpartition(".")
            value_at(new, node)[option] = [[round(step * total / before), value] for step, value in points]
        elif stuck:
            said = f"is 0 from step {end} on, so nothing is learned up to {total}; add {STRETCH}, or set a step size"
            errors.append(ConfigError(key, f"{said} to continue with: {key}={points[0][1] / 10:g}"))
        else:
            stays = f"{key} stays at {last:g}, where its schedule ended"
            notes.append(f"{stays}; {STRETCH} stretches it over the new total")
    if stretch and total != before and new == raw:
        errors = [ConfigError("schedules", f"none ends at total_steps={before}; leave out {STRETCH}")]
    if errors:
        raise joined(errors)
    return new, notes


def _literal(node: Any) -> Any:
    """Escape strings in settings that are already resolved, so that they are not interpolated."""
    if isinstance(node, Mapping):
        return {key: _literal(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literal(value) for value in node]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", node) if isinstance(node, str) else node


def _scheduled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedulable options of a run, by key."""
    return {key: value for at, node in raw.items() for key, value in scheduled(kind_of(at), at, node)}


# fmt: off
def _refusals(override: Override, key: str, raw: Mapping[str, Any], may: Sequence[str], why: str) -> Refusals:
    """Refuse overrides that cannot be parsed or may not change a key."""
    line, several = override.input_line, _chooses(override) and isinstance(override.value(), list)
    yield not key, "", f"cannot read {line!r}: write key=value"
    yield override.is_delete(), key, f"cannot be removed from a run; {line} works only when a run starts"
    yield (override.is_sweep_override(), key, lambda:
           f"{override.get_value_string()} is several values: give one, or write a list [a,b]")
    yield several and key not in SEVERAL, key, "should be exactly one option"
    if f"{key}.".startswith(tuple(f"{one}." for one in may)):
        return
    yield key.startswith(("hydra.", "hydra/")), key, "is fixed when a run starts and cannot be changed"
    if value_at(raw, key, ABSENT) is ABSENT and key not in GROUPS and not (override.is_add() and "." in key):
        raise no_such_key_of(raw, key)
    yield True, key, f"cannot be changed: {why}"
# fmt: on


def _chooses(override: Override) -> bool:
    return override.key_or_group.removesuffix(ONLY) in GROUPS and not isinstance(override.value(), dict)

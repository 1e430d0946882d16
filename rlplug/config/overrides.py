"""Apply a command line to a resolved configuration: a run is resumed or evaluated.

The configuration is not composed again, because defaults may have changed since; only a group that the command line
chooses is read from its YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplug.config.errors import already_there, dotted, no_such_key, show, value_at
from rlplug.config.schema import SEVERAL
from rlplug.registry import KINDS
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

RESUMABLE = ("total_steps", "eval", "log", "checkpoint", "logger", "hardware", "compile", "deterministic", "on_nan")
"""what may change when a run is resumed"""
WHY = "it alters what is learned; a run continues as it was started"
GROUPS = (*KINDS, "experiment")
ABSENT = object()


def change(raw: Mapping[str, Any], overrides: Sequence[str], may: Sequence[str], why: str) -> dict[str, Any]:
    """Apply a command line to a resolved configuration, as it would be applied on training.

    ``key=value`` sets an existing key, ``+key=value`` adds one, ``logger=[progress,wandb]`` chooses options of a group.
    The result is not validated; ``parse`` does that.

    Args:
        may: the keys that may change, with all keys below them.
        why: the reason why no other key may change, for the error message.

    Raises:
        ConfigError: a key does not exist or may not change, or the command line cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    from rlplug.config.composition import composed, explained, plain

    if flags := [override for override in overrides if override.startswith("-")]:
        raise ConfigError("", f"no flag {flags[0]} is known here; settings are written key=value")
    with explained(overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        _check(override, raw, may, why)
    config = OmegaConf.create(dict(raw))
    OmegaConf.set_struct(config, True)
    for override in sorted(parsed, key=_chooses, reverse=True):  # groups first
        key, value, chooses = _key(override), override.value(), _chooses(override)
        if override.is_add() and value_at(config, key) is not None and not isinstance(value, dict):
            raise already_there(key)
        add = override.is_add() or override.is_force_add()
        if value_at(config, key, ABSENT) is ABSENT and not add:
            raise no_such_key(config, key)
        try:
            if chooses:  # interpolations in the group's YAML refer to the run, and stay
                value = OmegaConf.to_container(composed([str(override.input_line), "~algo"])[key], resolve=False)
            OmegaConf.update(config, key, value, merge=not chooses, force_add=add or chooses)
        except (ConfigKeyError, ConfigAttributeError) as error:
            raise no_such_key(config, str(error.full_key)) from None
    return plain(config, overrides)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], key: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for each difference, in the order of the configuration.

    None stands for a missing value. A mapping that only one of the two has is one difference.
    """
    found: list[tuple[str, Any, Any]] = []
    for part in {**old, **new}:
        before, after, path = old.get(part), new.get(part), dotted(key, part)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, path)
        elif repr(before) != repr(after):  # 1 equals true and 1.0
            found.append((path, before, after))
    return found


def told(changed: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Return a line for each of ``differences``: ``total_steps: 20000 -> 40000`` or ``+ logger.wandb``."""
    lines: list[str] = []
    for key, old, new in changed:
        whole = isinstance(old, Mapping) or isinstance(new, Mapping)
        lines.append(f"{'-' if new is None else '+'} {key}" if whole else f"{key}: {show(old)} -> {show(new)}")
    return lines


def _check(override: Override, raw: Mapping[str, Any], may: Sequence[str], why: str) -> None:
    """Refuse what cannot be read and what may not change."""
    key = _key(override)
    if not key:
        raise ConfigError("", f"cannot read {override.input_line!r}: should be key=value")
    if override.is_delete():
        raise ConfigError(key, f"cannot be taken out of a run; {override.input_line} works when a run is started")
    if override.is_sweep_override():
        raise ConfigError(key, f"{override.get_value_string()} is several values: give one, or write a list [a,b]")
    if _chooses(override) and isinstance(override.value(), list) and override.key_or_group not in SEVERAL:
        raise ConfigError(key, "should be exactly one option")
    if f"{key}.".startswith(tuple(f"{one}." for one in may)):
        return
    if key.startswith(("hydra.", "hydra/")):
        raise ConfigError(key, "belongs to the start of a run and cannot be changed")
    if value_at(raw, key, ABSENT) is ABSENT and key not in GROUPS and not (override.is_add() and "." in key):
        raise no_such_key(raw, key)
    raise ConfigError(key, f"cannot be changed: {why}")


def _key(override: Override) -> str:
    """Return the key that is changed: ``critic_model`` for ``model@critic_model=mlp``."""
    return override.key_or_group if override.package is None else override.package


def _chooses(override: Override) -> bool:
    """Return whether it chooses options of a group; if not, it sets a value."""
    return override.key_or_group in GROUPS and not isinstance(override.value(), dict)

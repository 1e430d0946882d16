"""A command line on top of a configuration that is resolved already: a run goes on, or is evaluated.

Nothing is composed again, because defaults may have changed since; only a group that the command line chooses
is read from its YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from rlplug.config.composition import composed
from rlplug.config.messages import dotted, no_such_key, show
from rlplug.config.run import SEVERAL
from rlplug.registry import Kind
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

RESUMABLE = ("total_steps", "eval", "log", "checkpoint", "logger", "hardware", "compile", "deterministic", "on_nan")
"""what may change when a run is resumed"""
WHY = "it alters what is learned; a run continues as it was started"


def change(raw: Mapping[str, Any], overrides: Sequence[str], may: Sequence[str], why: str) -> dict[str, Any]:
    """Apply a command line to a resolved configuration, as it would be applied on training.

    ``key=value`` sets a key that there is, ``+key=value`` adds one, ``logger=[progress,wandb]`` chooses options
    of a group. The result is not validated; ``parse`` does that.

    Args:
        may: the keys that may change, with all below them.
        why: what is said about any other one.

    Raises:
        ConfigError: a key is not there, or may not change, or the command line cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from rlplug.config.composition import plain
    from rlplug.config.hydra_errors import explain

    if flags := [override for override in overrides if override.startswith("-")]:
        raise ConfigError("", f"no flag {flags[0]} is known here; settings are written key=value")
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except Exception as error:
        raise explain(error, overrides) from None
    for override in parsed:
        _check(override, raw, may, why)
    config: DictConfig = OmegaConf.create(dict(raw))
    OmegaConf.set_struct(config, True)
    for override in sorted(parsed, key=lambda override: not _chooses(override)):
        _apply(override, config)
    return plain(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) where the two part, in the order of the configuration.

    None stands for what is not there; what is there as a whole on one side only is one value.
    """
    found: list[tuple[str, Any, Any]] = []
    for part in {**old, **new}:
        before, after, path = old.get(part), new.get(part), dotted(key, (part,))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, path)
        elif repr(before) != repr(after):  # 1 equals true and 1.0
            found.append((path, before, after))
    return found


def told(changed: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """``total_steps: 20000 -> 40000``, or ``+ logger.wandb``: a line for each of ``differences``."""
    return [
        f"{'- ' if new is None else '+ '}{key}"
        if isinstance(old, Mapping) or isinstance(new, Mapping)
        else f"{key}: {show(old)} -> {show(new)}"
        for key, old, new in changed
    ]


def _check(override: Override, raw: Mapping[str, Any], may: Sequence[str], why: str) -> None:
    """Is it readable, and may it be done?"""
    key = _key(override)
    if not key:
        raise ConfigError("", f"cannot read {override.input_line!r}: should be key=value")
    if override.is_delete():
        raise ConfigError(key, f"cannot be taken out of a run; {override.input_line} works when a run is started")
    if override.is_sweep_override():
        value = override.get_value_string()
        raise ConfigError(key, f"{value} is several values: give one, or write a list [a,b]")
    if _chooses(override) and isinstance(override.value(), list) and override.key_or_group not in SEVERAL:
        raise ConfigError(key, "should be exactly one option")
    if any(key == one or key.startswith(f"{one}.") for one in may):
        return
    if key.startswith(("hydra.", "hydra/")):
        raise ConfigError(key, "is about how a run is started, and no part of it")
    if not _has(raw, key) and not _options(key) and not (override.is_add() and "." in key):
        raise no_such_key(raw, key)
    raise ConfigError(key, f"cannot be changed: {why}")


def _apply(override: Override, config: DictConfig) -> None:
    """As Hydra does, with its meaning of ``+``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    key, value = _key(override), override.value()
    there = OmegaConf.select(config, key, throw_on_missing=False) is not None
    if override.is_add() and there and not isinstance(value, dict):
        raise ConfigError(key, f"is there already: write {key}=<value>, without +")
    if not override.is_add() and not override.is_force_add() and not _has(config, key):
        raise no_such_key(config, key)
    try:
        if _chooses(override):
            OmegaConf.update(config, key, _node(override), merge=False, force_add=True)
        else:
            OmegaConf.update(config, key, value, merge=True, force_add=override.is_add() or override.is_force_add())
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise no_such_key(config, str(error.full_key)) from None


def _node(override: Override) -> Any:
    """What a group's YAML says, its interpolations still open: they are about the run."""
    from omegaconf import OmegaConf

    config = composed([str(override.input_line), "~algo"])
    return OmegaConf.to_container(config[_key(override)], resolve=False)


def _chooses(override: Override) -> bool:
    """Does it name options of a group, rather than set a value?"""
    return _options(override.key_or_group) and not isinstance(override.value(), dict)


def _options(key: str) -> bool:
    return key in get_args(Kind) or key == "experiment"


def _key(override: Override) -> str:
    """Where it does something: ``critic_model`` for ``model@critic_model=mlp``."""
    return override.key_or_group if override.package is None else override.package


def _has(raw: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return False
        raw = raw[part]
    return True

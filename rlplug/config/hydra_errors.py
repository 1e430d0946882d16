"""Refusals of Hydra and OmegaConf in rlplug's words: the key, what is wrong, what would be right.

Hydra's exceptions carry little but text, so the text is read. What is not recognised is passed on as it came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from rlplug.config.messages import no_such_key
from rlplug.config.session import PRIMARY, session
from rlplug.registry import broken, unknown
from rlplug.types import ConfigError


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """One message for a command line that Hydra refused.

    Args:
        overrides: the command line; flags among them are ignored.
    """
    if isinstance(error, ConfigError):
        return error
    overrides = [override for override in overrides if not override.startswith("-")]
    text, cause = str(error), error.__cause__
    if keyless := [override for override in overrides if override.startswith("=")]:
        return ConfigError("", f"cannot read {keyless[0]!r}: should be key=value")
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, overrides)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "Could not override" in text:
        return no_such_key(_around(overrides), str(cause.full_key))
    if found := re.search("(?:Ambiguous value for argument|Sweep parameters) '(.+?)=(.*?)'", text):
        return ConfigError(found[1], f"{found[2]} is several values: add -m to sweep over them, or write a list [a,b]")
    if found := re.search(r"Interpolation key 'hydra\.runtime\.choices\.(\w+)'", text):
        return ConfigError(
            found[1], f"should be exactly one option. There are: {', '.join(_options(found[1], overrides))}"
        )
    if "Config group override must be a string" in text and (found := _not_text(overrides)):
        return _unknown_option(found, overrides)
    if found := re.match(r"Could not override '(.+?)'\.\s*(Did you mean .*|No match.*)", text):
        return ConfigError(found[1], f"there is no such choice to make. {found[2]}")
    if found := re.search(r"Multiple values for (\S+)\.|An item is already at '(.+?)'", text):
        key = found[1] or found[2]
        return ConfigError(key, f"is there already: write {key}=<value>, without +")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(str(error.full_key), f"must be given: {error.full_key}=<value>")
    for known in (error, cause):
        if isinstance(known, OmegaConfBaseException):
            return ConfigError(str(known.full_key or ""), str(known).splitlines()[0])
    return ConfigError("", " ".join(text.partition("Config search path:")[0].split()) or type(error).__name__)


def _unreadable(error: OverrideParseException) -> ConfigError:
    reason = [line for line in str(error).splitlines() if line and not line.startswith(("Error parsing", "See "))]
    return ConfigError(
        error.override.partition("=")[0],
        f"cannot read {error.override!r}: should be key=value, with quotes around special characters"
        f" ({'; '.join(reason)})",
    )


def _unknown_option(path: str, overrides: Sequence[str]) -> ConfigError:
    """``env/foo``, or ``hydra/launcher/foo``: the group is as much of the path as has options."""
    group, options = path, list[str]()
    while not options and "/" in group:
        group = group.rpartition("/")[0]
        options = _options(group, overrides)
    if not options:
        return ConfigError("", f"there is no configuration {path!r} in the search path; see --info searchpath")
    name = path.removeprefix(group + "/")
    skipped = "".join(f". Skipped, because it is broken: {plugin} ({plugin.cause})" for plugin in broken())
    return ConfigError(group, f"unknown option {name!r}; {unknown(name, options)}{skipped}")


def _not_text(overrides: Sequence[str]) -> str | None:
    """The path of an option that is no text, ``algo/3`` for ``algo=3``."""
    with session() as loader:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            value = override.value()
            if loader.get_group_options(override.key_or_group) and not isinstance(value, str | list | dict):
                return f"{override.key_or_group}/{override.get_value_string()}"
    return None


def _options(group: str, overrides: Sequence[str]) -> list[str]:
    """The options of a group, with those of folders that the command line adds."""
    with session() as loader:
        return loader.get_group_options(group, config_name=PRIMARY, overrides=_folders(overrides))


def _around(overrides: Sequence[str]) -> Any:
    """The configuration that a wrong key was meant for: as chosen by the groups on the command line."""
    folders = _folders(overrides)
    with session() as loader:
        groups = [o for o in overrides if re.match(r"[\w/@]+=", o) and loader.get_group_options(re.split("[=@]", o)[0])]
        for attempt in ([*folders, *groups], folders):
            with suppress(Exception):
                return OmegaConf.to_container(hydra.compose(PRIMARY, attempt, return_hydra_config=True))
    return {}


def _folders(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if override.startswith("hydra.searchpath=")]

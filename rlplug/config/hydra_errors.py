"""Errors of Hydra and OmegaConf as messages with the key, what is wrong and what would be right.

Hydra's exceptions carry little but text, so the text is read. Text that is not recognized is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from rlplug.config.messages import already_there, no_such_key
from rlplug.config.session import PRIMARY, option_names, session
from rlplug.registry import broken, unknown
from rlplug.types import ConfigError


@contextmanager
def explained(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf as ``ConfigError``."""
    try:
        yield
    except Exception as error:
        raise explain(error, overrides) from None


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return one error for a command line that Hydra refused. Flags among the ``overrides`` are ignored."""
    if isinstance(error, ConfigError):
        return error
    overrides = [override for override in overrides if not override.startswith("-")]
    text, cause = str(error), error.__cause__
    if keyless := [override for override in overrides if override.startswith("=")]:
        return ConfigError("", f"cannot read {keyless[0]!r}: should be key=value")
    if isinstance(error, OverrideParseException):
        line = error.override
        reason = "; ".join(
            part for part in text.splitlines() if part and not part.startswith(("Error parsing", "See "))
        )
        advice = "should be key=value, with quotes around special characters"
        return ConfigError(line.partition("=")[0], f"cannot read {line!r}: {advice} ({reason})")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, overrides)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "Could not override" in text:
        return no_such_key(_base(overrides), str(cause.full_key))
    if found := re.search("(?:Ambiguous value for argument|Sweep parameters) '(.+?)=(.*?)'", text):
        return ConfigError(found[1], f"{found[2]} is several values: add -m to sweep over them, or write a list [a,b]")
    if found := re.search(r"Interpolation key 'hydra\.runtime\.choices\.(\w+)'", text):
        options = ", ".join(option_names(found[1], overrides))
        return ConfigError(found[1], f"should be exactly one option. There are: {options}")
    if "Config group override must be a string" in text:
        for override in OverridesParser.create().parse_overrides(overrides):
            if option_names(override.key_or_group) and not isinstance(override.value(), str | list | dict):
                return _unknown_option(f"{override.key_or_group}/{override.get_value_string()}", overrides)
    if found := re.match(r"Could not override '(.+?)'\.\s*(Did you mean .*|No match.*)", text):
        return ConfigError(found[1], f"there is no such group. {found[2]}")
    if found := re.search(r"Multiple values for (\S+)\.|An item is already at '(.+?)'", text):
        return already_there(found[1] or found[2])
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(str(error.full_key), f"must be given: {error.full_key}=<value>")
    for known in (error, cause):
        if isinstance(known, OmegaConfBaseException):
            return ConfigError(str(known.full_key or ""), str(known).splitlines()[0])
    return ConfigError("", " ".join(text.partition("Config search path:")[0].split()) or type(error).__name__)


def _unknown_option(path: str, overrides: Sequence[str]) -> ConfigError:
    """Split ``env/foo`` or ``hydra/launcher/foo``: the group is the longest beginning of the path that has options."""
    group, options = path, list[str]()
    while not options and "/" in group:
        group = group.rpartition("/")[0]
        options = option_names(group, overrides)
    if not options:
        return ConfigError("", f"there is no configuration {path!r} in the search path; see --info searchpath")
    skipped = "".join(f"; skipped because it is broken: {plugin} ({plugin.cause})" for plugin in broken())
    name = path.removeprefix(group + "/")
    return ConfigError(group, f"unknown option {name!r}; {unknown(name, options)}{skipped}")


def _base(overrides: Sequence[str]) -> Any:
    """Compose the groups of the command line without its settings."""
    groups = [o for o in overrides if re.match(r"[\w/@]+=", o) and option_names(re.split("[=@]", o)[0], overrides)]
    folders = [o for o in overrides if o.startswith("hydra.searchpath=")]
    with session(), suppress(Exception):
        return OmegaConf.to_container(hydra.compose(PRIMARY, [*folders, *groups], return_hydra_config=True))
    return {}

"""Explanations of Hydra's errors: the key, the cause and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from rlplug.config import errors, origins
from rlplug.config.errors import peers, value_at
from rlplug.config.origins import folders_of, loaded, option_names
from rlplug.config.schema import SEVERAL
from rlplug.registry import KINDS, owners
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

GROUPS = (*KINDS, "tuned", "experiment")
NOTHING = {"exploration": "exploration=[]", "logger": "logger.only=[]", "logger.only": "logger.only=[]"}
EXISTS = "exists already: write {}=<value>, without +"
SAID = {
    r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)=(.*?)'": r"\2 is several values: add -m to sweep over "
    "them, or write a list [a,b]",
    r"^Could not override '(sweeper)'\.": r"starts several runs, which needs -m: python -m rlplug -m \1=...",
    r"^Could not override '(.+?)'\.\s*(Did you mean .*|No match.*)": r"there is no such group. \2",
    r"(?:Multiple values for|An item is already at) '?([^\s']*\w)": EXISTS.format(r"\1"),
    r"^provider=(hydra\.searchpath) .*path=(.*) is not available": r"\2 does not exist",
}
"""patterns of Hydra's messages, whose first group is the key, and their replacements"""


@contextmanager
def explained(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Convert errors of Hydra and OmegaConf to ``ConfigError``."""
    try:
        yield
    except Exception as error:
        raise explain(error, overrides) from None


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return an error of Hydra or OmegaConf with its key and a fix, parsed from its text."""
    if isinstance(error, ConfigError):
        return error
    overrides = [override for override in overrides if not override.startswith("-")]
    text, cause = str(error), error.__cause__
    if isinstance(error, RecursionError):
        files = " or ".join(map(str, origins.chosen_files(overrides)))
        return ConfigError("", f"{files or 'a value'} is nested too deeply")
    try:
        origins.check_packages((file.group, file.option) for file in origins.chosen_files(overrides))
    except ConfigError as wrong:
        return wrong
    if isinstance(error, MarkedYAMLError):
        return origins.unreadable(error)
    if keyless := [override for override in overrides if override.startswith("=")]:
        return ConfigError("", f"cannot read {keyless[0]!r}: write key=value")
    if isinstance(error, OverrideParseException):
        line = next((word for word in overrides if error.override.endswith(word)), error.override)  # as written
        reason = " ".join(text.partition("\n")[2].partition("See http")[0].split())
        special = f", with quotes around special characters ({reason})" if "=" in line else ""
        return ConfigError(line.partition("=")[0] if special else "", f"cannot read {line!r}: write key=value{special}")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        found = unknown_option(error.missing_cfg_file, overrides)
        group, _, option = error.missing_cfg_file.partition("/")
        return ConfigError(found.key, found.message + origins.asked_by(group, option, overrides))
    if (found := re.match(r"Could not delete from config\. '(.+?)' does not exist", text)) or (
        isinstance(cause, ConfigAttributeError | ConfigKeyError)
        and (found := re.match(r"Could not override '(.+)'", text))
    ):
        tree, key = _base(overrides), found[1]
        inside = value_at(tree, key) is not None  # the value is a mapping with this key
        return no_such_key_of(tree, cause.full_key if inside else key)  # type: ignore[union-attr]
    if found := re.search(r"Interpolation key 'hydra\.runtime\.choices\.(\w+)'", text):
        return ConfigError(found[1], f"should be exactly one option of {', '.join(option_names(found[1], overrides))}")
    if "${algo}_${env}" in text:  # from the defaults list
        group = "env" if any(word.startswith(("~env", "env=[")) for word in overrides) else "algo"
        return ConfigError(group, f"should be exactly one option of {', '.join(option_names(group, ['~tuned']))}")
    if "Config group override must be a string" in text:
        for override in OverridesParser.create().parse_overrides(overrides):
            if option_names(override.key_or_group) and not isinstance(override.value(), str | list | dict):
                return unknown_option(f"{override.key_or_group}/{override.get_value_string()}", overrides)
    for pattern, sentence in SAID.items():
        if found := re.search(pattern, text):
            return ConfigError(found[1], found.expand(sentence))
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(str(error.full_key), f"must be given: {error.full_key}=<value>")
    for known in (error, cause):
        if isinstance(known, OmegaConfBaseException):
            return ConfigError(str(known.full_key or ""), str(known).splitlines()[0])
    return ConfigError("", " ".join(text.partition("Config search path:")[0].split()) or type(error).__name__)


def unknown_option(path: str, overrides: Sequence[str]) -> ConfigError:
    """Return the error for a path such as ``env/foo``; the group is the longest prefix with options."""
    parts = path.split("/")
    for end in range(len(parts) - 1, 0, -1):
        group, name = "/".join(parts[:end]), "/".join(parts[end:])
        if options := option_names(group, overrides):
            others = peers("options").get(group.removesuffix(".only"), {})
            meant = {term.lower(): option for term, option in others.items()}.get(name.lower())
            said = f"unknown option {name!r}"
            if (declares := owners().get((group, name), ())) and not origins.is_selected(group, name):  # type: ignore[call-overload]
                said = f"{declares[0]} has no conf/{group}/{name}.yaml to select its {group} {name!r}"
            nothing = group in NOTHING and name.lower() in ("none", "null", "false")
            if words := [NOTHING[group]] if nothing else [] if meant else chosen_as(name, {}, without=group):
                return ConfigError(group, f"{said}; did you mean {' or '.join(words)}?")
            return ConfigError(group, f"{said}; {unknown(name, options, '', True, meant)}")
    return ConfigError("", f"there is no configuration {path!r} in the search path; see --info searchpath")


def no_such_key_of(tree: Mapping[str, Any], key: str) -> ConfigError:
    """Return an error that suggests a choice of a component with this key, or ``errors.no_such_key``."""
    kind, _, rest = key.partition(".")
    name, nodes = rest.partition(".")[0], value_at(tree, kind) or {}
    if kind in SEVERAL and name not in nodes and name in option_names(kind):
        return not_chosen(kind, name, nodes)
    if key not in peers("keys") and (words := chosen_as(key, tree)):
        return ConfigError(key, f"unknown key; did you mean {' or '.join([*errors.elsewhere(tree, key), *words])}?")
    return errors.no_such_key(tree, key)


def not_chosen(kind: str, name: str, nodes: Iterable[str]) -> ConfigError:
    return ConfigError(f"{kind}.{name}", f"is not selected; add it: {_together(kind, name, nodes)}")


def _together(kind: str, name: str, nodes: Iterable[str]) -> str:
    """Return ``exploration=[gaussian,icm]``: the current choices, except those of every run, and one more."""
    always = loaded([f"{kind}=[]"])[kind]
    return f"{kind}=[{','.join([*(other for other in nodes if other not in always), name])}]"


def chosen_as(name: str, nodes: Mapping[str, Any], without: str = "") -> list[str]:
    """Return the overrides that choose an option by name in any group: ``buffer=her``, ``experiment=rainbow_pong``.

    Args:
        nodes: nodes of the run, by key; current choices in groups with several choices are kept.
        without: group to skip.
    """
    found: list[str] = []
    for group in GROUPS:
        called = peers("options").get(group, {}).get(name, name)
        for option in option_names(group) if group not in ("tuned", without) else ():
            if option == called or (group == "experiment" and option.startswith(f"{name}_")):
                several = group in SEVERAL
                found.append(_together(group, option, nodes.get(group) or ()) if several else f"{group}={option}")
    return found


def _base(overrides: Sequence[str]) -> Any:
    """Compose the command line's group choices without its settings."""
    groups = [o for o in overrides if re.match(r"[\w/@]+=(?!{)", o) and option_names(re.split("[=@]", o)[0], overrides)]
    with suppress(Exception):
        return OmegaConf.to_container(loaded([*folders_of(overrides), *groups]))
    return {}

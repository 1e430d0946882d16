"""Whose mistake it is: a wrong value may come from a package's YAML file, and not from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from rlplug.config.errors import UnknownKeyError, joined, single, value_at
from rlplug.config.schema import SEVERAL, kind_of
from rlplug.registry.presets import Preset, preset, presets
from rlplug.types import ConfigError

GLOBAL = "_global_"


def blamed(error: ConfigError, choices: Mapping[str, Any], words: Sequence[str]) -> ConfigError:
    """Return the error with the file, for each mistake that stands in one and not on the command line.

    Args:
        choices: slot -> chosen option, as Hydra has them.
        words: the command line.
    """
    files, errors = [*_chosen(choices)], single(error)
    totals = [one.message.split()[0] for one in errors if one.key == "total_steps"]  # points of schedules repeat it
    errors = [one for one in errors if not one.key.endswith("][0]") or one.message.split()[0] not in totals]
    return joined([_blamed(one, files, words) for one in errors])


def _blamed(error: ConfigError, files: Sequence[tuple[str, Preset]], words: Sequence[str]) -> ConfigError:
    key, missing = error.key.partition("[")[0], error.message == "is missing"
    given = not error.message.startswith("must be given") and ("unknown" in error.message or not key.endswith(".name"))
    if not key or not given or any(_sets(word, key) for word in words):
        return error
    within = f"{key.rpartition('.')[0]}.name" if missing else key
    for package, file in files:
        if value_at(_put(package, file), within) is None:
            continue
        if missing:
            return ConfigError(error.key, f"is missing in {file}")
        slot, kind = key.partition(".")[0], kind_of(key)
        if file.group != kind and any(re.match(rf"({kind}@)?{slot}=", word) for word in words):
            way = f"leave it out: ~{key}" if isinstance(error, UnknownKeyError) else f"set it: {key}=<value>"
            return ConfigError(error.key, f"{error.message}; {file} sets it for another {kind}; {way}")
        return ConfigError(error.key, f"{error.message}; it stands in {file}")
    return error


def _sets(word: str, key: str) -> bool:
    """Return whether a word of the command line sets a value at a key, above or below it."""
    name, _, value = word.lstrip("+~").partition("=")
    if "." not in name and (name.partition("@")[0], value) in presets():
        return False  # a choice
    return f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")


def _chosen(choices: Mapping[str, Any]) -> Iterator[tuple[str, Preset]]:
    """Yield the chosen files with the keys that they are put under, those first that win over others."""
    order = ("experiment", "tuned", "algo")
    for slot in sorted(choices, key=lambda slot: order.index(slot) if slot in order else len(order)):
        group, _, package = slot.partition("@")
        if isinstance(choices[slot], str) and (file := preset(group, choices[slot])):
            yield file.package or package or group.replace("/", "."), file
    for (group, _), (file, *_) in presets().items():  # Hydra does not say which of these are chosen
        if group in SEVERAL:
            yield file.package or group, file


def _put(package: str, file: Preset) -> Any:
    """Return what a file holds, under its key."""
    try:
        content = yaml.safe_load(file.path.read_bytes())
    except (yaml.YAMLError, RecursionError):
        return {}
    for part in reversed([] if package == GLOBAL else package.split(".")):
        content = {part: content}
    return content


def check_packages(choices: Iterable[tuple[str, Any]]) -> None:
    """Raise ``ConfigError`` if a chosen file lacks the first line that says where its settings belong.

    Args:
        choices: groups and the options chosen of them; of a group of several, the one that lies where they should.
    """
    for group, option in choices:
        file = preset(group, option) if isinstance(option, str) else None
        if file is None or file.package is not None:
            continue
        whole = group in ("tuned", "experiment") or "name" in (value_at(_put(GLOBAL, file), group) or ())
        if whole or group in SEVERAL:
            line = GLOBAL if whole else f"{group}.{option}"
            raise ConfigError(group, f"{file} lacks its first line: # @package {line}")


def choices_of(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the groups and options that a command line chooses, where the options are files."""
    chosen = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    chosen = {"tuned": "_".join(chosen.get(group, "") for group in ("algo", "env")), **chosen}
    return [pair for pair in chosen.items() if pair in presets()]


def asked_by(group: str, option: str, words: Sequence[str]) -> str:
    """Return ``; <file> asks for it`` where a chosen file, and not the command line, names an option; else nothing."""
    for file in (presets()[pair][0] for pair in choices_of(words)):
        entries = (_put(GLOBAL, file) or {}).get("defaults") or ()
        asks = [
            (key.split("@")[0].split("/")[-1], value)
            for entry in entries
            if isinstance(entry, dict)
            for key, value in entry.items()
        ]
        if (group, option) in asks:
            return f"; {file} asks for it"
    return ""


def is_selected(kind: str, name: str) -> bool:
    """Return whether a file, whatever it is called, selects a component."""
    files = (files[0] for (group, _), files in presets().items() if group == kind)
    return any(
        re.search(rf"^\s*name:\s*{re.escape(name)}\s*$", file.path.read_text("utf-8"), re.MULTILINE) for file in files
    )


def unreadable(error: yaml.MarkedYAMLError) -> ConfigError:
    """Return the error for a file that is no YAML."""
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    name = mark.name if mark else ""
    file = next((str(file) for files in presets().values() for file in files if str(file.path) == name), name)
    return ConfigError("", f"{file} is no YAML: {error.problem}{where}")

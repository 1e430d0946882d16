"""Origins of settings: YAML files of packages on Hydra's search path, and attribution of errors to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig

from rlplug.config.errors import UnknownKeyError, joined, single, value_at
from rlplug.config.schema import SEVERAL, kind_of
from rlplug.registry import plugins
from rlplug.registry.presets import Preset, preset, presets
from rlplug.types import ConfigError

PRIMARY = "config"
VERSION_BASE = "1.3"
GLOBAL = "_global_"
CUSTOM = {"env": "gymnasium", "mod": "custom"}  # options that take module:Class


class PluginConfigs(SearchPathPlugin):
    """Appends each plugin's folder. rlplug's is first, so other plugins cannot replace its ``config.yaml``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in plugins():
            if plugin.conf:
                search_path.append(provider=plugin.distribution, path=f"{Configs.scheme()}://{plugin.conf}")


class Configs(FileConfigSource):
    """A package's folder. The group ``logger.only`` has the options of ``logger``."""

    @staticmethod
    def scheme() -> str:
        return "rlplug"

    @staticmethod
    def _normalize_file_name(filename: str) -> str:
        return FileConfigSource._normalize_file_name(filename).replace("logger.only/", "logger/")

    def is_group(self, config_path: str) -> bool:
        return super().is_group(re.sub(r"logger\.only$", "logger", config_path))

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        return super().list(re.sub(r"logger\.only$", "logger", config_path), results_filter)


def register() -> None:
    """Make the packages' groups known to Hydra, in this process only."""
    Plugins.instance().register(PluginConfigs)
    Plugins.instance().register(Configs)


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Initialize Hydra for ``hydra.compose``, and restore the state of a running Hydra program afterwards."""
    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        setbase(VERSION_BASE)
        # hydra.initialize would read the source of every caller, to find what ``config_path`` is relative to
        yield Hydra.create_main_hydra2("rlplug", create_config_search_path(None)).config_loader
    finally:
        GlobalHydra.instance().hydra = outer


def loaded(overrides: Sequence[str]) -> DictConfig:
    """Compose with Hydra, including its node ``hydra``; errors are not converted."""
    with session():
        return hydra.compose(PRIMARY, opened(overrides), return_hydra_config=True)


def opened(words: Iterable[str]) -> list[str]:
    """Let Hydra choose nested components by name, and classes by path, and add settings that are in no YAML.

    ``algo.algo=dqn``; ``env=module:Class``, ``model=module:Net``, ``model@critic_model=module:Net``.
    """
    found: list[str] = []
    for word in words:
        if own := re.fullmatch(r"(env|model(?:@(\w+))?)=([\w.]+:[\w.]+)", word):  # a class without a package
            found.append(f"{own[1]}={CUSTOM[own[1][:3]]}")
            word = f"{own[2] or own[1]}.entry_point={own[3]}"
        if word.startswith("algo."):
            word = re.sub(r"\b(algo|\w*model):(\w+)(?=[,}])", r"\1:{name:\2}", word)
            word = re.sub(r"=\{([^{}]*),(name:\w+)", r"={\2,\1", word)  # the name first
            if chosen := re.fullmatch(r"(algo\.(?:algo|(\w+\.)+(?:algo|\w*model)))=((?!null)[a-z]\w*|\{name:.*)", word):
                found += [f"~{chosen[1]}"] * (chosen[2] is None)  # other settings were for another algorithm
                word = word if "{" in word else f"{chosen[1]}.name={chosen[3]}"
        found.append(re.sub(r"^(?=(algo\.(algo|policies|\w*model)|env\.(groups|joint))(\.[^.=]+)*=)", "++", word))
    return found


def folders_of(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that add folders to the search path."""
    return [word for word in overrides if word.startswith("hydra.searchpath=")]


def option_names(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the options of a group: YAML files of all plugins, and of folders added by overrides."""
    with session() as loader:
        return loader.get_group_options(group, overrides=list(overrides))


Files = Sequence[tuple[str, Preset]]
"""files of packages, with the keys of their settings"""


def files_of(overrides: Sequence[str]) -> Files:
    """Return the files that Hydra composes, by precedence; empty if one is outside of the packages."""
    with session() as loader, suppress(HydraException):
        every = reversed(loader.compute_defaults_list(PRIMARY, list(overrides), RunMode.RUN).defaults)
        found = ((one.package, preset(*one.config_path.rsplit("/", 1))) for one in every if "/" in one.config_path)
        return [(package, file) for package, file in found if file]
    return ()


def blamed(error: ConfigError, files: Files, words: Sequence[str]) -> ConfigError:
    """Name the file in each error whose value comes from one of ``files`` and not from the command line."""
    errors = single(error)
    totals = [one.message.split()[0] for one in errors if one.key == "total_steps"]  # errors of schedules repeat it
    errors = [one for one in errors if not one.key.endswith("][0]") or one.message.split()[0] not in totals]
    return joined([_blamed(one, files, words) for one in errors])


def _blamed(error: ConfigError, files: Files, words: Sequence[str]) -> ConfigError:
    key, missing = error.key.partition("[")[0], error.message == "is missing"
    given = not error.message.startswith("must be given") and ("unknown" in error.message or not key.endswith(".name"))
    if not key or not given or any(_sets(word, key) for word in words):
        return error
    within = f"{key.rpartition('.')[0]}.name" if missing else key
    file = next((file for package, file in files if _holds(package, file, within)), None)
    if file is None or missing:
        return ConfigError(error.key, f"is missing in {file}") if file else error
    slot, kind = key.partition(".")[0], kind_of(key)
    if file.group != kind and any(re.match(rf"({kind}@)?{slot}=", word) for word in words):
        way = f"leave it out: ~{key}" if isinstance(error, UnknownKeyError) else f"set it: {key}=<value>"
        return ConfigError(error.key, f"{error.message}; {file} sets it for another {kind}; {way}")
    return ConfigError(error.key, f"{error.message}; it is set in {file}")


def _sets(word: str, key: str) -> bool:
    """Return whether an override sets a value at, above or below a key."""
    name, _, value = word.lstrip("+~").partition("=")
    if "." not in name and (name.partition("@")[0], value) in presets():
        return False  # a group choice
    return f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")


def _holds(package: str, file: Preset, key: str) -> bool:
    """Return whether a file with settings under ``package`` has a value at a key."""
    inside = key.removeprefix(f"{package}.") if package not in ("", GLOBAL) else key
    return (inside != key or package in ("", GLOBAL)) and value_at(_content(file), inside) is not None


def _content(file: Preset) -> Any:
    with suppress(yaml.YAMLError, RecursionError):
        return yaml.safe_load(file.path.read_bytes())


def check_packages(choices: Iterable[tuple[str, Any]]) -> None:
    """Raise ``ConfigError`` if a chosen file lacks the first line with its package.

    Args:
        choices: groups and their chosen options; of groups with several choices, one with the right package.
    """
    for group, option in choices:
        file = preset(group, option) if isinstance(option, str) else None
        if file is None or file.package is not None:
            continue
        whole = group in ("tuned", "experiment") or "name" in (value_at(_content(file), group) or ())
        if whole or group in SEVERAL:
            line = GLOBAL if whole else f"{group}.{option}"
            raise ConfigError(group, f"{file} lacks its first line: # @package {line}")


def chosen_files(words: Iterable[str]) -> list[Preset]:
    """Return the files that a command line chooses, and the tuned one of its algorithm and environment."""
    chosen = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    chosen = {"tuned": "_".join(chosen.get(group, "") for group in ("algo", "env")), **chosen}
    return [file for pair in chosen.items() if (file := preset(*pair))]


def asked_by(group: str, option: str, words: Sequence[str]) -> str:
    """Return ``; <file> asks for it`` if a chosen file, not the command line, names an option; else empty."""
    asks = re.compile(rf"\W{re.escape(group)}(@\S+)?: *{re.escape(option)}\s")
    found = (f"; {file} selects it" for file in chosen_files(words) if asks.search(file.path.read_text("utf-8")))
    return next(found, "")


def is_selected(kind: str, name: str) -> bool:
    """Return whether any file selects a component."""
    selects = re.compile(rf"^\s*name:\s*{re.escape(name)}\s*$", re.MULTILINE)
    files = (files[0] for (group, _), files in presets().items() if group == kind)
    return any(selects.search(file.path.read_text("utf-8")) for file in files)


def unreadable(error: yaml.MarkedYAMLError) -> ConfigError:
    """Return the error for a file that is not valid YAML."""
    mark = error.problem_mark or error.context_mark
    where, name = (f", line {mark.line + 1}, column {mark.column + 1}", mark.name) if mark else ("", "")
    file = next((str(file) for files in presets().values() for file in files if str(file.path) == name), name)
    return ConfigError("", f"{file} is not valid YAML: {error.problem}{where}")
